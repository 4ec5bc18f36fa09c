"""What the search benchmark plans: models, devices and batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One planning task. `mesh`: as `autopar.plan` reads it; a number of devices is factorised by the search. `batch`:
    samples in all.

    `layers` and `sequence` are the model's usual ones if None. `is_limited`: a plan must fit the devices' memory.
    """

    model: str
    cluster: str
    mesh: str
    batch: int
    sequence: int | None = None
    layers: int | None = None
    time_limit_s: float = 30.0
    is_limited: bool = True

    @property
    def title(self) -> str:
        """
        >>> Case("gpt2", "h100", "8x8", 64).title, Case("gpt2", "h100", "8x8", 64, 512, layers=4).title
        ('gpt2 h100 8x8', 'gpt2 (4 layers, sequence 512) h100 8x8')
        """
        sizes = [f"{self.layers} layers"] * bool(self.layers) + [f"sequence {self.sequence}"] * bool(self.sequence)
        return " ".join([self.model, *([f"({', '.join(sizes)})"] if sizes else []), self.cluster, self.mesh])


LLAMA_8B = Case("llama3-8b", "h100", "32x8", 64, 8192)
GPT_39B = Case("gpt-39b", "v100-25g", "64", 16)
LLAMA_405B = Case("llama3-405b", "h100", "16384", 256)

# Batches: 32 images a device as AutoDDL and Whale have; tokens such that a plan fits the devices.
SUITE: tuple[Case, ...] = (
    *(Case("vgg13", "p100", str(n), 32 * n) for n in (8, 32, 128)),
    *(Case("vgg13", "v100-25g", str(n), 32 * n) for n in (8, 64)),
    *(Case("resnet50-100k", "v100-50g", str(n), 32 * n) for n in (8, 16, 32)),
    Case("bert-large", "p100", "32", 256),
    Case("bert-large", "v100-25g", "64", 512),
    Case("bert-large", "a100", "512", 4096),
    Case("gpt2-xl", "v100-50g", "64", 64),
    Case("gpt2-xl", "a100", "64", 128),
    GPT_39B,
    Case("gpt-39b", "h100", "256", 256),
    Case("t5-large", "v100-50g", "64", 128),
    Case("t5-large", "a100", "64", 256),
    LLAMA_8B,
    Case("llama3-8b", "a100", "64", 32, 8192),
    Case("llama3-8b", "h100", "1024", 1024, 8192),
    Case("llama3-70b", "h100", "256", 32),
    Case("llama3-70b", "h100", "2048", 256),
    LLAMA_405B,
)
# Plans in stages: devices too small, links too slow, or neither. The time is enough on a machine that does other things
# besides.
STAGED: tuple[Case, ...] = (
    Case("gpt-2.6b", "v100", "8", 32, time_limit_s=90.0),
    Case("gpt-2.6b", "v100", "8", 32, 2048, time_limit_s=90.0),
    Case("gpt2-xl", "v100", "8", 64, time_limit_s=90.0),
    Case("gpt2-xl", "v100", "4", 32, 2048, time_limit_s=90.0),
    Case("gpt2-xl", "v100-25g", "64", 64, time_limit_s=90.0),
    Case("gpt-39b", "v100-25g", "64", 64, time_limit_s=90.0),
    Case("llama3-8b", "v100-25g", "64", 64, 4096, time_limit_s=90.0),
    Case("llama3-8b", "a100", "16", 32, 4096, time_limit_s=90.0),
    Case("llama3-8b", "h100", "64", 64, 4096, time_limit_s=90.0),
    Case("t5-large", "v100-25g", "32", 128, time_limit_s=90.0),
    Case("vit-l", "v100-25g", "16", 512, time_limit_s=90.0),
    Case("bert-large", "p100", "32", 256, time_limit_s=90.0),
)

# Search alone: models on meshes of two and of three axes, at two depths.
TABLES: tuple[Case, ...] = (
    Case("vgg13", "p100", "4x8", 1024),
    Case("bert-large", "v100-25g", "8x8", 512),
    Case("gpt2-xl", "v100-50g", "8x8", 64),
    Case("gpt2-xl", "v100-50g", "2x4x8", 64),
    Case("llama3-8b", "h100", "8x8", 64, 8192, layers=12),
    Case("llama3-8b", "h100", "8x8", 64, 8192, layers=192),
    Case("llama3-8b", "h100", "2x4x8", 64, 8192, layers=12),
    Case("llama3-8b", "h100", "2x4x8", 64, 8192, layers=192),
    Case("t5-large", "v100-50g", "8x8", 128),
    Case("gpt-39b", "v100-25g", "8x8", 16),
)
# What is left for labels and CP-SAT: tables that the bound does not close.
REFINED: tuple[Case, ...] = (
    Case("gpt2", "h100", "2x4", 8),
    Case("bert-large", "v100-25g", "8x8", 512),
    Case("gpt-39b", "v100-25g", "8x8", 16),
)
