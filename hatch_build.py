"""Generates the protobuf stubs of proto/ into the package, for wheels and editable installs alike."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtobufStubs(BuildHookInterface[Any]):
    """Runs protoc (from grpcio-tools) over proto/; the Python import path equals the proto package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from grpc_tools import protoc

        root = Path(self.root)
        sources = sorted(str(path) for path in (root / "proto").rglob("*.proto"))
        out = str(root)
        arguments = [
            "protoc",
            f"-I{root / 'proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
        ]
        if protoc.main([*arguments, *sources]) != 0:
            raise RuntimeError("protoc failed on proto/; its messages are above")
        (root / "kvtier" / "v1" / "__init__.py").write_text(
            '"""Generated protobuf messages and gRPC stubs of kvtier.v1."""\n'
        )
