"""`Run`: a training run under torchrun that resumes by itself on the ranks that there are."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autopar.api import compile as compile_model
from autopar.elastic.background_save import BackgroundSave
from autopar.elastic.cached_plans import asked_request, check_fewest, plan_ahead, plan_key
from autopar.elastic.checkpoints import (
    DamagedCheckpoint,
    Manifest,
    check_files,
    complete,
    drop_partial,
    read_manifest,
    step_of,
)
from autopar.elastic.heartbeat import Heartbeat
from autopar.elastic.join_ranks import join
from autopar.elastic.lease import Lease, job_name
from autopar.elastic.plan_files import PlanFiles
from autopar.elastic.run_state import RunState, check_same_model
from autopar.errors import AutoparError, PlanError, warn
from autopar.mesh import Devices, Mesh, as_mesh
from autopar.runtime.sharded_module import ShardedModule

MeshOf = Callable[[int], "str | tuple[int, ...]"]


class Run:
    """A context: the run whose checkpoints are in `folder`, which all ranks see.

    torchrun starts the script again on all ranks when one dies, or nodes come and go (`--nnodes 2:4 --max-restarts
    10`); then `compile` plans for the ranks that there are, and `steps` goes on behind the newest checkpoint that is as
    it was written. AutoparError if another job uses the folder.

    `save_every`: steps between checkpoints, which are written beside training. `keep`: complete ones that stay.
    `min_ranks`: the fewest ranks to go on with, for which a plan is made at the first start.
    """

    def __init__(self, folder: str | os.PathLike, *, save_every: int = 100, keep: int = 2, min_ranks: int = 1) -> None:
        for name, value in (("save_every", save_every), ("keep", keep), ("min_ranks", min_ranks)):
            if type(value) is not int or value < 1:
                raise AutoparError(f"{name}= expects a positive number, found {value!r}")
        self.folder, self.save_every, self.keep, self.min_ranks = Path(folder), save_every, keep, min_ranks
        self.step = 0  # steps done
        self._lease: Lease | None = None
        self._joined = False
        self._alive: Heartbeat | None = None

    def __enter__(self) -> Self:
        if not dist.is_initialized():
            self._alive, self._joined = join(), True
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._control = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        if self.num_ranks < self.min_ranks:
            raise AutoparError(
                f"min_ranks={self.min_ranks}, but there are {self.num_ranks} ranks: start more, or give torchrun's"
                " --nnodes a minimum that has as many"
            )
        self._token = self._first(self._take)
        self._saver = BackgroundSave(self.folder, self._lease, self.keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._saver.finish()
            self._saver.close()
            dist.barrier(group=self._control)
        if self._lease is not None:
            self._lease.release()
        if self._alive is not None and kind is None:
            self._alive.stop()
        if kind is None and self._joined:
            dist.destroy_process_group()

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def compile(
        self,
        model: nn.Module,
        *,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        mesh: MeshOf | None = None,
        **options: Any,
    ) -> ShardedModule:
        """`autopar.compile` for the ranks that there are, by a plan that an earlier start made for as many, if any.

        `mesh`: ranks -> mesh, such as `lambda n: f"dp={n // 2},tp=2"`; by default the search chooses it. All others: as
        in `autopar.compile`, example arguments included. Plans for some other numbers of ranks are made in the
        background: one made anew and one that keeps the stored layouts, of which a later start takes the one with which
        moving and the steps to the next change take less. InfeasibleError if `min_ranks` ranks do not hold the model.
        """
        if options.get("logical_ranks") is not None:  # nothing is planned
            return compile_model(model, _mesh_for(mesh, self.num_ranks), **options)
        files = PlanFiles(self.folder, plan_key(model, args, kwargs or {}, options | {"mesh": mesh is None}))
        compiled, here = None, _mesh_for(mesh, self.num_ranks)
        if path := self._first(lambda: files.chosen(self.num_ranks)):
            known = {name: value for name, value in options.items() if name in ("loss_fn", "batch", "outputs", "check")}
            try:
                compiled = compile_model(model, here, args=args, kwargs=kwargs, plan=path, **known)
            except PlanError as error:
                self._tell(f"{path} is planned anew: {error}")
        if compiled is None:
            compiled, path = compile_model(model, here, args=args, kwargs=kwargs, **options), files.anew(self.num_ranks)
            self._first(lambda: files.save(compiled.plan, path))
        self._first(lambda: files.use(self.num_ranks, path))
        self._first(lambda: self._plan_others(compiled, mesh, files, path, options))
        return compiled

    def steps(
        self, num_steps: int, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **others: Any
    ) -> Iterator[int]:
        """The numbers of the steps that are left of `num_steps`; each is done when the next one is asked for.

        Before the first, model, optimizers, `others` and random state are those of the newest checkpoint, if there is
        one. `others`: by name, modules, and objects with `state_dict` and `load_state_dict`, which are the same on all
        ranks: the sampler, a learning rate schedule. After the last step all is saved. AutoparError if the checkpoint
        is of another model or another global batch, before anything is read into the model.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        state = RunState(model, optimizers, others)
        shapes = self._all_shapes(state)
        self._restore(state, shapes)
        while self.step < num_steps:
            yield self.step
            self.step += 1
            if self._lease is not None:
                self._lease.check()
            if not self._saver.is_busy:
                self._saver.finish()  # what made a save fail is told at the step after
            if self.step % self.save_every == 0 and self.step < num_steps and not self._any_busy():
                self._save(state, shapes)
        self._saver.finish()
        if self._saver.saved_step != self.step:
            self._save_last(state, shapes)

    def _save(self, state: RunState, shapes: Mapping[str, Any]) -> None:
        batch = state.global_batch
        manifest = Manifest(self.step, self.num_ranks, job_name(), batch, shapes, {})
        self._saver.start(state, manifest, self._token, self._control)

    def _save_last(self, state: RunState, shapes: Mapping[str, Any]) -> None:
        self._save(state, shapes)
        self._saver.finish()
        if self._saver.saved_step != self.step:
            raise AutoparError(
                f"the state after the last step, {self.step}, could not be saved in {self.folder}:"
                f" {self._saver.failure()}; make room, and start the run again: it goes on from the checkpoint before"
            )

    def _restore(self, state: RunState, shapes: Mapping[str, Any]) -> None:
        path = self._newest(shapes, state.global_batch)
        if path is None:
            return
        state.put_tensors(path, self._control)
        state.put_others(path)
        self.step = self._saver.saved_step = step_of(path)

    def _newest(self, shapes: Mapping[str, Any], global_batch: int | None) -> Path | None:
        """The newest checkpoint that is as it was written, of which each rank checks some of the files."""
        for path in self._first(lambda: complete(self.folder)):
            manifest = self._first(lambda path=path: _manifest_or_damage(path))
            if not (damage := manifest if isinstance(manifest, str) else ""):
                check_same_model(path, manifest, shapes, global_batch)
                names = sorted(manifest.files)[self.rank :: self.num_ranks]
                damage = next(filter(None, self._gathered(_damage(path, manifest, names))), "")
            if not damage:
                return path
            self._tell(f"the checkpoint {path} is damaged and left out: {damage}; the one before it is taken")
        return None

    def _all_shapes(self, state: RunState) -> dict[str, Any]:
        """The model's tensors, those of all stages."""
        return {name: shape for shapes in self._gathered(state.shapes()) for name, shape in shapes.items()}

    def _any_busy(self) -> bool:
        """Whether any rank still writes the checkpoint before; then this one is left out, and no step waits for it."""
        return any(self._gathered(self._saver.is_busy))

    def _take(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lease = Lease(self.folder, job_name())
        with self._lease.held():
            drop_partial(self.folder)
        return self._lease.owner.token

    def _plan_others(
        self, model: ShardedModule, mesh: MeshOf | None, files: PlanFiles, path: Path, options: Mapping[str, Any]
    ) -> None:
        """Plans for other numbers of ranks: for the fewest now, for those that are likely next in the background."""
        graph, request = model._autopar.current().graph, asked_request(model.plan, options)
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        if self.min_ranks < self.num_ranks and not files.anew(self.min_ranks).exists():
            fewer = {size: _mesh_for(mesh, size) for size in range(self.min_ranks, self.num_ranks)}
            check_fewest(files, model.plan, graph, request, fewer)
        likely = (self.num_ranks - per_node, self.num_ranks + per_node, self.num_ranks - 2 * per_node)
        meshes = {size: _mesh_for(mesh, size) for size in likely if size >= self.min_ranks}
        plan_ahead(files, path, graph, request, meshes)

    def _first(self, work: Callable[[], Any]) -> Any:
        """The result of `work()` on the first rank; what it raises there is raised on all ranks."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except (AutoparError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _gathered(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(items, item, group=self._control)
        return items

    def _tell(self, message: str) -> None:
        if self.rank == 0:
            warn(message)


def _mesh_for(mesh: MeshOf | None, num_ranks: int) -> Mesh | Devices:
    return Devices(num_ranks) if mesh is None else as_mesh(mesh(num_ranks))


def _manifest_or_damage(path: Path) -> Manifest | str:
    try:
        return read_manifest(path)
    except DamagedCheckpoint as error:
        return str(error)


def _damage(path: Path, manifest: Manifest, names: Sequence[str]) -> str:
    try:
        check_files(path, manifest, names)
    except DamagedCheckpoint as error:
        return str(error)
    return ""
