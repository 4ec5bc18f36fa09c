"""`DimParts`: how a dim is cut in parts for collectives, which take equal parts."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DimParts:
    """A dim in parts of these `sizes`; (): all are equal. Smaller parts are padded with zeros for a collective."""

    dim: int
    sizes: tuple[int, ...] = ()

    def of_whole(self, whole: torch.Tensor, index: int, num_parts: int) -> torch.Tensor:
        """Part number `index` of a whole tensor, a view."""
        if not self.sizes:
            return whole.chunk(num_parts, self.dim)[index]
        return whole.narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """A part, along dim 0, as large as the largest."""
        return _padded(part, max(self.sizes)) if self.sizes else part

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """All parts, along dim 0, each as large as the largest."""
        if not self.sizes:
            return whole
        return torch.cat([_padded(part, max(self.sizes)) for part in whole.split(self.sizes)])

    def joined(self, padded: torch.Tensor) -> torch.Tensor:
        """The whole, of what `spread` gives."""
        if not self.sizes:
            return padded
        return torch.cat([part[:size] for part, size in zip(padded.split(max(self.sizes)), self.sizes)])

    def own(self, padded: torch.Tensor, index: int) -> torch.Tensor:
        """Part number `index`, of what is padded."""
        return padded[: self.sizes[index]] if self.sizes else padded


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - part.shape[0]
    return torch.cat((part, part.new_zeros((missing, *part.shape[1:])))) if missing else part
