"""`DimParts`: how a dim is cut in parts for collectives, which take equal parts."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DimParts:
    """A dim in parts of these `sizes`; (): all are equal. Smaller parts are padded with zeros for a collective.

    In `sections`, each of the `num_parts` equal parts is a share of each section, and collectives take and give the
    dim in the order of parts.
    """

    dim: int
    sizes: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    num_parts: int = 1

    def of_whole(self, whole: torch.Tensor, index: int, num_parts: int) -> torch.Tensor:
        """Part number `index` of a whole tensor; a view, but in sections."""
        if self.sections:
            sections = whole.split(self._section_sizes(whole.shape[self.dim]), self.dim)
            return torch.cat([section.chunk(num_parts, self.dim)[index] for section in sections], self.dim)
        if not self.sizes:
            return whole.chunk(num_parts, self.dim)[index]
        return whole.narrow(self.dim, sum(self.sizes[:index]), self.sizes[index])

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        """A part, along dim 0, as large as the largest."""
        return _padded(part, max(self.sizes)) if self.sizes else part

    def spread(self, whole: torch.Tensor) -> torch.Tensor:
        """All parts, along dim 0, each as large as the largest."""
        if self.sections:
            sections = [one.chunk(self.num_parts) for one in whole.split(self._section_sizes(len(whole)))]
            return torch.cat([share for part in zip(*sections, strict=True) for share in part])
        if not self.sizes:
            return whole
        return torch.cat([_padded(part, max(self.sizes)) for part in whole.split(self.sizes)])

    def joined(self, padded: torch.Tensor) -> torch.Tensor:
        """The whole, of what `spread` gives."""
        if self.sections:
            shares = self._section_sizes(len(padded) // self.num_parts)
            parts = [part.split(shares) for part in padded.chunk(self.num_parts)]
            return torch.cat([share for section in zip(*parts, strict=True) for share in section])
        if not self.sizes:
            return padded
        return torch.cat([part[:size] for part, size in zip(padded.split(max(self.sizes)), self.sizes)])

    def own(self, padded: torch.Tensor, index: int) -> torch.Tensor:
        """Part number `index`, of what is padded."""
        return padded[: self.sizes[index]] if self.sizes else padded

    def _section_sizes(self, extent: int) -> list[int]:
        return [size * (extent // sum(self.sections)) for size in self.sections]


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - part.shape[0]
    return torch.cat((part, part.new_zeros((missing, *part.shape[1:])))) if missing else part
