"""`LogicalModule`: data parallelism over a fixed number of logical ranks, with the same bits on any number of ranks."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, MeshError, MicrobatchError
from autopar.ir.kept_attributes import Unannounced
from autopar.ir.trace_with_loss import LossFunction
from autopar.logical.sum_tree import Node, SumOverRanks, blocks, nodes_of, sum_of
from autopar.runtime.interop.own_forward import own_members
from autopar.runtime.rank_agreement import peers_alive, take_from_first
from autopar.runtime.seeded_rng import draw_seed
from autopar.torch_compat import pytree


class LogicalModule(Unannounced, nn.Module):
    """Mixed into the class of the user's model by `logical_module`. Its parameters are whole on every rank."""

    _logical: "LogicalRanks"

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a global batch: the mean of the logical ranks' losses, on every rank.

        Called as the module is; with a `loss_fn`, with its target behind. Gradients are added to those of the
        parameters. Buffers are afterwards those of the first logical rank, as under DistributedDataParallel.
        """
        return self._logical.step(self, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not self._logical.is_inside:
            raise AutoparError(
                "a model with logical_ranks= is trained by model.train_step(*batch), which runs each logical rank's"
                " part alone; model(...) is for evaluation: call model.eval(), or use torch.no_grad()"
            )
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AutoparError(
            "a compiled module cannot be pickled whole, for it is of this process: save its state_dict()"
        )


def logical_module(model: nn.Module, mesh: DeviceMesh, num_logical: int, loss_fn: LossFunction | None) -> LogicalModule:
    """`model` itself, trained as on `num_logical` ranks, which the ranks of `mesh` compute among them.

    MeshError for a mesh or a number that no mapping serves.
    """
    ranks = LogicalRanks(mesh, num_logical, loss_fn)
    with torch.no_grad(), peers_alive():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, x in take_from_first(mesh, tensors).items():
            tensors[name].copy_(x)
    original = type(model)
    members = {"__module__": original.__module__} | own_members(model, LogicalModule)
    model.__class__ = type(original.__name__, (LogicalModule, original), members)
    found = cast(LogicalModule, model)
    found._logical = ranks
    return found


class LogicalRanks:
    """The logical ranks of a step, those of this rank, and how their gradients are added."""

    def __init__(self, mesh: DeviceMesh, num_logical: int, loss_fn: LossFunction | None) -> None:
        _check(mesh, num_logical)
        axis = max(range(mesh.ndim), key=mesh.size)
        self.num, self.loss_fn, self.group = num_logical, loss_fn, mesh.get_group(axis)
        self.rank, num_ranks = mesh.get_local_rank(axis), mesh.size()
        self.blocks = blocks(num_logical, num_ranks)
        self.own = nodes_of(self.blocks[self.rank], (0, num_logical))
        self.is_inside = False
        self._means: dict[torch.dtype, SumOverRanks] = {}
        if mesh.device_type == "cpu":
            torch.set_num_threads(1)  # sums inside a kernel are split by threads, of which each launch has others

    def step(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The loss of a step, whose gradients are added to the parameters'."""
        parts = _parts(args, kwargs, self.num)
        seed, names = draw_seed(), [name for name, x in module.named_parameters() if x.requires_grad]
        before = {name: x.grad for name, x in module.named_parameters()}
        buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
        first_buffers = buffers
        sums = []

        def leaf(node: Node) -> list[torch.Tensor | None] | None:
            nonlocal first_buffers
            if node[1] - node[0] > 1:
                return None
            _put(module, buffers)
            gradients = self._alone(module, parts[node[0]], seed + node[0], names)
            if node[0] == 0:
                first_buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
            return gradients

        try:
            for node in self.own:
                sums.append(sum_of(node, leaf, _added))
        finally:
            for name, x in module.named_parameters():
                x.grad = before[name]
        loss, *gradients = self._over_ranks(sums, dict(module.named_parameters()), names)
        _put(module, self._of_first(first_buffers))
        with torch.no_grad():
            for name, gradient in zip(names, gradients):
                if gradient is not None:
                    parameter = module.get_parameter(name)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return cast(torch.Tensor, loss)

    def _alone(self, module: nn.Module, part: tuple, seed: int, names: Sequence[str]) -> list[torch.Tensor | None]:
        """The loss of one logical rank and its gradients, of the parameters `names`."""
        parameters = dict(module.named_parameters())
        for name in names:
            parameters[name].grad = None
        args, kwargs = part
        content = {name: _content(x) for name, x in parameters.items()}
        self.is_inside = True
        try:
            with _seeded(seed):
                if self.loss_fn is None:
                    loss = module(*args, **kwargs)
                else:
                    loss = self.loss_fn(module(*args[:-1], **kwargs), args[-1])
                loss = _scalar(loss)
                if torch.is_grad_enabled():
                    loss.backward()
        finally:
            self.is_inside = False
        gradients = [parameters[name].grad for name in names]
        if any(x is not None and x.layout is not torch.strided for x in gradients):
            raise AutoparError("sparse gradients have no fixed order of sums: give sparse=False to the embedding")
        for name, x in parameters.items():
            if _content(x) != content[name]:
                raise AutoparError(
                    f"the forward writes parameter {name}, which each logical rank would do in turn: write to it around"
                    " train_step (the momentum encoder's update after optimizer.step())"
                )
        return [loss.detach().clone(), *gradients]  # the model may keep its own

    @torch.no_grad()
    def _over_ranks(
        self, sums: Sequence[list[torch.Tensor | None]], parameters: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> list[torch.Tensor | None]:
        """The mean over all logical ranks of the loss and of each gradient; None for one that no logical rank has.

        The tensors of `sums` are overwritten. Where one is missing zeros are sent, and before all numbers of a type one
        for each that tells whether it is there.
        """
        loss = sums[0][0]
        assert loss is not None, "a step has a loss"
        like = [loss, *(parameters[name] for name in names)]
        results: list[torch.Tensor | None] = [None] * len(like)
        for dtype in sorted({x.dtype for x in like}, key=str):
            here = [i for i, x in enumerate(like) if x.dtype == dtype]
            sizes = [len(here), *(like[i].numel() for i in here)]
            mean = self._means.setdefault(dtype, SumOverRanks(self.blocks, self.rank, self.group))
            for row, vector in zip(sums, mean.rows(sum(sizes), dtype, loss.device)):
                is_there, *places = vector.split(sizes)
                is_there.copy_(torch.tensor([row[i] is not None for i in here]))
                for i, place in zip(here, places):
                    _write(row[i], place)
            with peers_alive():
                vector = mean.mean()
            is_there, *places = vector[: sum(sizes)].split(sizes)
            for i, found, place in zip(here, (is_there != 0).tolist(), places):
                if found:
                    result = sums[0][i]
                    result = torch.empty_like(like[i]) if result is None else result
                    results[i] = result.copy_(place.view(result.shape))
        return results

    def _of_first(self, buffers: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The buffers that the first rank has, which computed the first logical one."""
        for x in buffers.values():
            with peers_alive():
                dist.broadcast(x, group=self.group, group_src=0)
        return buffers


def _check(mesh: DeviceMesh, num_logical: int) -> None:
    if type(num_logical) is not int or num_logical < 1:
        raise AutoparError(f"logical_ranks= expects a positive number, found {num_logical!r}")
    if max(mesh.shape) != mesh.size() or (mesh.ndim > 1 and mesh.size() == 1):
        raise MeshError(
            f"logical_ranks= is data parallelism along one axis, found mesh {tuple(mesh.shape)}: layouts that split"
            f" tensors or stages add in another order on other meshes; give mesh=({mesh.size()},)"
        )
    if mesh.size() > num_logical:
        raise MeshError(
            f"logical_ranks={num_logical} on {mesh.size()} ranks: no mapping gives each rank a logical one; start at"
            f" most {num_logical}"
        )


def _parts(args: tuple, kwargs: Mapping[str, Any], num: int) -> list[tuple]:
    """(args, kwargs) of each logical rank: its rows of each tensor that has dims, in memory of their own, for kernels
    may add in another order where memory is aligned otherwise.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    sizes = {x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim}
    if len(sizes) != 1 or next(iter(sizes)) % num:
        raise MicrobatchError(
            f"logical_ranks={num} splits every tensor of the batch along dim 0 in {num} equal parts, found"
            f" {sorted(sizes) or 'no tensor'} rows; give all tensors the same number of rows, a multiple of {num}"
        )

    def rows(x: Any, index: int) -> Any:
        return x.chunk(num)[index].clone() if isinstance(x, torch.Tensor) and x.ndim else x

    return [pytree.tree_unflatten([rows(x, index) for x in leaves], structure) for index in range(num)]


def _scalar(loss: Any) -> torch.Tensor:
    """The loss that a model returned: a scalar, or the first or "loss" of its outputs."""
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    if isinstance(loss, tuple):
        loss = loss[0]
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise AutoparError(
            f"logical_ranks= trains on a scalar loss, found {getattr(loss, 'shape', type(loss).__name__)}: return the"
            " loss, or give loss_fn="
        )
    return loss


def _added(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The sum of two lists of tensors. A missing one is zero: adding it changes no bit but the sign of a zero, so it is
    added.
    """
    return [
        None if x is None and y is None else _or_zeros(x, cast(torch.Tensor, y)) + _or_zeros(y, cast(torch.Tensor, x))
        for x, y in zip(one, other)
    ]


def _write(x: torch.Tensor | None, place: torch.Tensor) -> None:
    """The elements of `x` in order, or zeros."""
    if x is None:
        place.zero_()
    else:
        place.view(x.shape).copy_(x)


def _or_zeros(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if x is None else x


def _content(x: torch.Tensor) -> tuple[int, int]:
    """A key of the content, another one once it was written or replaced."""
    return x._version, x.data_ptr()


@torch.no_grad()
def _put(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, x in module.named_buffers():
        if not torch.equal(x, buffers[name]):
            x.copy_(buffers[name])


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers inside are those of `seed`: torch's, NumPy's and Python's; afterwards they go on as before."""
    states = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # each rank has one
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
