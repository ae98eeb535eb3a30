"""Generates the protobuf stubs of proto/ into the package, and puts the CUDA sources of kernels/ into wheels."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedFiles(BuildHookInterface[Any]):
    """Runs protoc (from grpcio-tools) over proto/; the Python import path equals the proto package.

    An editable install needs no copy of kernels/: it finds them in the checkout.
    """

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
        if version == "standard" and self.target_name == "wheel":
            build_data["force_include"][str(root / "kernels")] = "kvtier/_kernels"
