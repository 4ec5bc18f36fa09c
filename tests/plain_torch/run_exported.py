"""A program for torchrun: exported files train as one device does, where nothing of autopar can be imported.

`python -m torch.distributed.run --nproc-per-node 4 -m tests.plain_torch.run_exported CASES.json`; the json is a list of
{"file", "model" (of tests.plain_torch.models), "shape"}; it prints a line with the losses of both for each case.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["autopar"] = None  # type: ignore[assignment] # an import fails

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.plain_torch.models import build
from tests.zoo import Case

STEPS = 5


def losses(model: Any, loss_of: Callable[[], torch.Tensor]) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(x) for x in found]


def one_device(name: str, dtype: str = "") -> list[float]:
    """The losses on one device, which computes in `dtype` over the parameters."""
    case = build(name)

    def output() -> Any:
        if not dtype:
            return case.model(*case.args, **case.kwargs)
        cast = {fqn: p.to(getattr(torch, dtype)) for fqn, p in case.model.named_parameters()}
        return torch.func.functional_call(case.model, cast, case.args, case.kwargs, tie_weights=True)

    return losses(case.model, lambda: case.loss(output()))


def rows_of(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """(this rank's place, number) of the ranks that have rows of their own."""
    place, number = 0, 1
    for axis in axes:
        place = place * mesh[axis].size() + mesh.get_local_rank(axis)
        number *= mesh[axis].size()
    return place, number


def exported(name: str, module: Any, mesh: DeviceMesh) -> list[float]:
    case: Case = build(name)
    place, number = rows_of(mesh, module.BATCH_AXES)

    def own(x: Any) -> Any:
        return x.chunk(number)[place] if isinstance(x, torch.Tensor) else x

    args, kwargs = tuple(map(own, case.args)), {key: own(x) for key, x in case.kwargs.items()}
    labels = case.loss.__closure__[0].cell_contents if case.loss.__closure__ else None
    if hasattr(module, "pipeline"):
        target = {} if labels is None else {"target": own(labels)}
        loss_fn = None if labels is None else torch.nn.functional.cross_entropy
        return in_stages(*module.pipeline(case.model, mesh, loss_fn), lambda step: step(*args, **target, **kwargs))
    model = module.parallelize(case.model, mesh)
    loss_of = case.loss if labels is None else (lambda output: torch.nn.functional.cross_entropy(output, own(labels)))
    found = losses(model, lambda: loss_of(model(*args, **kwargs)))
    mean = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def by_transformers(name: str, module: Any, folder: Path) -> list[float]:
    """The losses of a model that `from_pretrained` makes in parts."""
    import transformers.integrations.accelerate

    # asked for any device, though nothing of it is called for one device a rank
    transformers.integrations.accelerate.is_accelerate_available = lambda: True
    case, config = build(name), module.distributed_config()
    if dist.get_rank() == 0:
        case.model.save_pretrained(folder)
    dist.barrier()
    model = type(case.model).from_pretrained(folder, distributed_config=config, dtype=torch.float64).train()
    place = dist.get_rank() // config.tp_size
    kwargs = {key: x.chunk(config.dp_size)[place] for key, x in case.kwargs.items()}
    mean = torch.tensor(losses(model, lambda: case.loss(model(**kwargs))), dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def in_stages(parts: list[Any], step: Any, call: Callable[[Any], torch.Tensor | None]) -> list[float]:
    """The losses of some steps of a pipeline, from the ranks of the last stage."""
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, foreach=False) for part in parts]
    found = []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = call(step)
        for optimizer in optimizers:
            optimizer.step()
        total = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0], dtype=torch.float64)
        dist.all_reduce(total)
        found.append(float(total[0] / total[1]))
    return found


def loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    dist.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        module = loaded(case["file"])
        found = {
            "case": case["name"],
            "dtype": case.get("dtype", ""),
            "expected": one_device(case["model"], case.get("dtype", "")),
        }
        try:
            if hasattr(module, "distributed_config"):
                found["found"] = by_transformers(case["model"], module, Path(case["file"]).with_suffix(""))
            else:
                mesh = init_device_mesh("cpu", tuple(case["shape"]), mesh_dim_names=module.AXES)
                found["found"] = exported(case["model"], module, mesh)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:1500]
            traceback.print_exc()
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
