"""Where the rotary embedding of each layer turns queries and keys, and their second moments over many positions.

A rotary embedding turns the plane of channels c and c + R/2 by an angle of frequency c times the position; channels
from R on stay as they are. Frequencies are taken from the cosines and sines that a model gives its attention modules,
and then it is tried whether they explain what the model does: any model that turns its keys in another way is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvtier.errors import InvalidRequestError
from kvtier.worker import WorkerModel
from kvtier.worker.attention import LayerCall

_TRIED_POSITION = 97
_TOLERANCE = 1e-3  # of the largest magnitude; angles in fp32 are good to 1e-5 there


class Rotation(NamedTuple):
    """The rotary embedding of one layer.

    Attributes:
        frequencies: `(R/2,)` fp64, radians a position; empty for a layer without rotary embedding.
        head_dim: D, at least R.
    """

    frequencies: torch.Tensor
    head_dim: int

    def turn(self, values: torch.Tensor, positions: int) -> torch.Tensor:
        """`values` `(..., D)` as if each stood `positions` further."""
        half = len(self.frequencies)
        angles = (self.frequencies * positions).to(values.device)
        cosines, sines = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
        first, second, others = values.tensor_split((half, 2 * half), dim=-1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines, others), dim=-1)

    def share_in_planes(self, energies: torch.Tensor) -> torch.Tensor:
        """`energies` `(..., D)` with the mean of both where two channels are turned into each other."""
        half = len(self.frequencies)
        first, second, others = energies.tensor_split((half, 2 * half), dim=-1)
        mean = (first + second) / 2
        return torch.cat((mean, mean, others), dim=-1)

    def spread(self, moments: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Second moments `(..., D, D)` fp64 of the same vectors, each turned further by 0 to `num_positions` - 1.

        The mean over all these positions, exactly: with the eigenvectors V of the rotations and their frequencies w,
        the mean of R S R^T is V (P * V^H S V) V^H, where P[a, b] is the mean of exp(i position (w[a] - w[b])).
        """
        eigenvectors, frequencies = self._eigen()
        weights = _mean_of_phases(frequencies.unsqueeze(1) - frequencies, num_positions)
        inside = eigenvectors.mH @ moments.to(torch.complex128) @ eigenvectors
        return (eigenvectors @ (weights * inside) @ eigenvectors.mH).real

    def _eigen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvectors of the rotations as columns `(D, D)` complex128, and the frequency of each `(D,)` fp64."""
        half = len(self.frequencies)
        vectors = torch.eye(self.head_dim, dtype=torch.complex128)
        planes = torch.eye(half, dtype=torch.complex128) * 0.5**0.5
        vectors[:half, :half], vectors[half : 2 * half, :half] = planes, -1j * planes
        vectors[:half, half : 2 * half], vectors[half : 2 * half, half : 2 * half] = planes, 1j * planes
        still = torch.zeros(self.head_dim - 2 * half, dtype=torch.float64)
        return vectors, torch.cat((self.frequencies, -self.frequencies, still))


def rotations_of(model: WorkerModel) -> list[Rotation]:
    """The rotary embedding of each layer.

    Raises `InvalidRequestError` for a model whose keys do not depend on their positions as described above.
    """
    probe = _Probe()
    device = model.module.device
    # NOTE: The probe's attention adds nothing, so equal tokens differ by their positions alone, in every layer.
    positions = torch.tensor([[0, 1, min(_TRIED_POSITION, model.max_tokens - 1)]], device=device)
    hooks = [module.register_forward_pre_hook(probe.note, with_kwargs=True) for module in model.module.modules()]
    with torch.inference_mode():
        model.module(input_ids=torch.ones_like(positions), position_ids=positions, use_cache=False, kvtier_batch=probe)
    for hook in hooks:
        hook.remove()
    tried = int(positions[0, -1])
    return [_rotation(call, embeddings, tried, model.name) for call, embeddings in probe.calls]


class _Probe:
    """An attention batch that keeps what the layers ask for, with the cosines and sines that they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[LayerCall, Any]] = []
        self._embeddings: Any = None

    def note(self, module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before every module; the last one before the attention function is the attention module."""
        self._embeddings = named.get("position_embeddings", self._embeddings)

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append((call, self._embeddings))
        self._embeddings = None
        return torch.zeros_like(call.query)


def _rotation(call: LayerCall, embeddings: Any, tried: int, model: str) -> Rotation:
    head_dim = call.key.shape[-1]
    if torch.equal(call.key[0].expand_as(call.key), call.key):
        return Rotation(torch.zeros(0, dtype=torch.float64), head_dim)
    match embeddings:
        case (torch.Tensor() as cosines, torch.Tensor() as sines) if cosines.shape[-1] <= head_dim:
            rotation = Rotation(_frequencies(cosines, sines), head_dim)
        case _:
            raise InvalidRequestError(
                f"layer {call.layer} of {model} does not get its rotary embedding as cosines and sines; kvtier cannot "
                "calibrate this model, use the recipe `search`"
            )
    for values in (call.key, call.query):
        expected = rotation.turn(values[0].double(), tried)
        if (expected - values[2]).abs().max() > _TOLERANCE * values.abs().max():
            raise InvalidRequestError(
                f"layer {call.layer} of {model} does not turn channel c with channel c + R/2 by its rotary embedding; "
                "kvtier cannot calibrate this model, use the recipe `search`"
            )
    return rotation


def _frequencies(cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """From those at positions 0 and 1, `(1, T, R)`: the first half of R channels has them all.

    A factor on both, as of YaRN, falls out.
    """
    half = cosines.shape[-1] // 2
    return torch.atan2(sines[0, 1, :half].double(), cosines[0, 1, :half].double()).cpu()


def _mean_of_phases(frequencies: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of exp(i n w) over n from 0 to `count` - 1, for each w of `frequencies`; complex128.

    A geometric series: exp(i (count - 1) w / 2) sin(count w / 2) / (count sin(w / 2)).
    """
    half = frequencies / 2
    still = half.sin().abs() < 1e-15
    size = torch.where(still, 1.0, (count * half).sin() / (count * half.sin().where(~still, torch.ones_like(half))))
    return torch.polar(torch.ones_like(half), (count - 1) * half) * size
