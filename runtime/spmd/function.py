"""``@spmd``: an ordinary function of whole arrays, run on every device of a mesh."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from autoshard.errors import (
    AutoshardError,
    InputError,
    MeshError,
    RankError,
    RequestError,
    SpecError,
)
from autoshard.runtime.eager.body import EagerOptions, Objects, objects_of
from autoshard.runtime.processes import (
    Pool,
    World,
    current_world,
    get_pool,
    in_world,
    launcher,
    under_launcher,
)
from autoshard.runtime.spmd.ambient import Ambient
from autoshard.runtime.spmd.captured import Captured, captured_by, names_used
from autoshard.runtime.spmd.courier import MOST_BYTES, Courier, loose
from autoshard.runtime.spmd.home import bring_home, from_pieces, from_replies
from autoshard.runtime.spmd.homecoming import Homecoming
from autoshard.runtime.spmd.request import (
    Changes,
    Reply,
    Request,
    collect,
    communicator,
    execute,
    is_running,
    perform,
    schedulers_of,
)
from autoshard.runtime.spmd.sendable import by_value, unsendable
from autoshard.runtime.spmd.shipment import Loose, pack, unpack
from autoshard.runtime.spmd.specs import (
    Argument,
    InShardings,
    OutSharding,
    ParameterShardings,
    check_entries,
    check_parameters,
    layout_of,
    out_layouts,
    parameter_layouts,
    place_arguments,
)
from autoshard.runtime.spmd.standing import OpaqueError, Standing
from autoshard.runtime.spmd.worth import warn_of_small_cuts
from autoshard.runtime.watch import profiling, trace
from autoshard.runtime.watch.records import CallTrace, RankTrace
from autoshard.sharding.mesh import DeviceMesh

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

DEFAULT_TIMEOUT_S = 300.0
_PROCESS_BYTES = 100_000_000  # what one more process on this machine takes at least


class SpmdFunction(Generic[Arguments, Returned]):
    """A function that runs on every device of a mesh; called like the one it was made of.

    Attributes:
        function: the function it was made of.
        mesh: where it runs.
    """

    def __init__(
        self,
        function: Callable[Arguments, Returned],
        *,
        mesh: DeviceMesh,
        in_shardings: InShardings,
        out_sharding: OutSharding,
        parameter_shardings: ParameterShardings,
        timeout_s: float,
        options: EagerOptions,
    ) -> None:
        self.function, self.mesh = function, mesh
        self._in, self._parameters = in_shardings, parameter_shardings
        self._out = out_layouts(out_sharding, mesh)
        self._timeout_s, self._options = timeout_s, options
        self._warned: set[tuple[object, ...]] = set()
        self._is_known = False
        self._courier = Courier()
        self._standing: Standing | None = None
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None
        self._check_count()
        with contextlib.suppress(AttributeError):
            functools.update_wrapper(self, function)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        """Run the function on the mesh; its result, whole.

        Raises:
            RequestError: the arguments, or what is said of them, do not fit; nothing was done.
            RankError: a rank raised, died or did not answer.
        """
        result: Returned = _Call(self, args, kwargs).run()
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method of a class."""
        if instance is None:
            return self
        bound = self.function.__get__(instance, owner)
        out = object.__new__(type(self))
        out.__dict__.update(self.__dict__)
        out.function, out._standing = bound, None
        out._signature = inspect.signature(bound)
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": None}  # which is about objects that stay here

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<spmd {name} on {self.mesh}>"

    def _check_count(self) -> None:
        """Refuse more entries than the function has parameters."""
        if not isinstance(self._in, list | tuple) or self._signature is None:
            return
        kinds = [p.kind for p in self._signature.parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
            return
        if len(self._in) > len(kinds):
            name = getattr(self.function, "__qualname__", repr(self.function))
            names = ", ".join(repr(n) for n in self._signature.parameters) or "none"
            raise SpecError(
                f"in_shardings has {len(self._in)} entries, but {name} has "
                f"{len(kinds)} {'argument' if len(kinds) == 1 else 'arguments'}: {names}; "
                "give at most one entry for each that is or contains a tensor or an array"
            )

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Argument]:
        """The arguments of a call by the names that messages give them.

        Raises:
            TypeError: as the function itself would.
        """
        if self._signature is None:
            named = [Argument(f"argument {i}", value) for i, value in enumerate(args)]
            return [*named, *(Argument(name, value) for name, value in kwargs.items())]
        bound = self._signature.bind(*args, **kwargs)
        out: list[Argument] = []
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                out += [Argument(f"{name}[{i}]", item) for i, item in enumerate(value)]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                out += [Argument(key, item) for key, item in value.items()]
            else:
                out.append(Argument(name, value))
        return out


class _Call:
    """One call: check, send, run, bring home."""

    def __init__(
        self, spmd: SpmdFunction[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.spmd, self.mesh = spmd, spmd.mesh
        self.args, self.kwargs = args, kwargs
        self.name = getattr(spmd.function, "__qualname__", type(spmd.function).__name__)

    def _prepare(self) -> None:
        """Find out what the arguments are, and check what is said of them."""
        spmd, args, kwargs = self.spmd, self.args, self.kwargs
        self.arguments = spmd.arguments(args, kwargs)
        self.placed = place_arguments(spmd._in, self.arguments, self.mesh)
        self.captured: Captured = captured_by(spmd.function, (*args, *kwargs.values()))
        self.objects: Objects = objects_of((args, kwargs, tuple(self.captured.objects)), {})
        known = {id(t) for t in self.objects.tensors}
        self.tensors = [(n, t) for n, t in self.captured.tensors if id(t) not in known]
        self.modules = self._module_names()
        self.cuts = parameter_layouts(spmd._parameters, self.modules, self.mesh)
        self._check_tensors()
        self._check_worth()

    # ---- before -----------------------------------------------------------------------------

    def _module_names(self) -> list[tuple[str, nn.Module]]:
        names = {
            id(a.value): f"argument {a.name!r}"
            for a in self.arguments
            if isinstance(a.value, nn.Module)
        }
        return [
            (names.get(id(m), f"a {type(m).__name__} that {self.name} uses"), m)
            for m in self.objects.modules
        ]

    def _check_tensors(self) -> None:
        by_id = {id(p.value): p.name for p in self.placed}
        for tensor in self.objects.tensors:
            name = by_id.get(id(tensor), f"a tensor that {self.name} is given")
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                raise InputError(
                    f"argument {name!r} was computed from tensors that require a gradient; no "
                    f"gradient goes out of an @spmd function: compute it inside {self.name}, or "
                    f"pass {name}.detach()"
                )
        for name, tensor in self.tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise InputError(
                    f"{self.name} refers to {name!r}, a tensor that requires a gradient and belongs"
                    " to no module; pass it as an argument"
                )

    def _check_worth(self) -> None:
        cuts: list[tuple[str, Any, Any, bool]] = [
            (f"argument {p.name!r}", p.value, p.spec, False)
            for p in self.placed
            if p.spec is not None and p.spec.partition_spec.names
        ]
        for (of, _), found in zip(self.modules, self.cuts, strict=True):
            cuts += [(f"parameter {n!r} of {of}", p, s, True) for n, (p, s) in found.items()]
        key = tuple((name, tuple(t.shape)) for name, t, _, _ in cuts)
        if cuts and key not in self.spmd._warned:
            self.spmd._warned.add(key)
            owned = [p for _, m in self.modules for p in m.parameters()]
            warn_of_small_cuts(cuts, [*self.objects.tensors, *owned], self.mesh)

    def _request(self, *, ambient: Ambient | None, watch: bool) -> Request:
        layouts = {id(p.value): p.layout for p in self.placed}
        held: list[torch.Tensor] = [p for m in self.objects.modules for p in m.parameters()]
        held += [t for t in self.objects.tensors if isinstance(t, torch.Tensor) and t.is_leaf]
        return Request(
            function=self.spmd.function,
            args=self.args,
            kwargs=self.kwargs,
            objects=tuple(self.captured.objects),
            tensors=tuple(self.tensors),
            gradients=[(t, t.grad) for t in held if t.grad is not None] if ambient else (),
            mesh=self.mesh,
            in_layouts=[layouts.get(id(t)) for t in self.objects.tensors],
            out_layout=self.spmd._out,
            parameter_layouts=[
                {name: layout_of(spec, tuple(p.shape)) for name, (p, spec) in found.items()}
                for found in self.cuts
            ],
            options=self.spmd._options,
            ambient=ambient,
            watch=watch,
        )

    # ---- running ----------------------------------------------------------------------------

    def run(self) -> Any:
        if is_running():
            raise RequestError(
                f"{self.name} is an @spmd function and was called inside another one; call "
                f"{self.name}.function, which runs as a part of it"
            )
        watch = trace.is_tracing() or profiling.is_profiling()
        world = current_world(self.spmd._timeout_s)
        if world is None:
            with self.spmd._courier.lock:
                return self._in_pool(watch)
        self._prepare()
        return self._here(world, watch)

    def _in_pool(self, watch: bool) -> Any:
        standing = self.spmd._standing
        found = None if standing is None else standing.again(self.args, self.kwargs)
        if standing is None or found is None:
            self._prepare()
            return self._send(watch)
        self.spmd._standing = None  # till all is well
        replies = self._replies(
            lambda: self.spmd._courier.call(
                standing.rest,
                lambda block: standing.load(found, block),
                _pool(self.mesh, self.spmd._timeout_s),
                ambient=Ambient.here(),
                watch=watch,
            )
        )
        home = standing.homecoming
        if home is not None and home.replies is replies:
            result = home.bring(found)
        else:
            changes = replies[0].changes
            assert changes is not None
            result = bring_home(changes, from_replies(replies, self.mesh.shape), found, (), ())
            if self.spmd._courier.comes_again(replies):
                standing.homecoming = Homecoming.of(replies, found, self.mesh.shape)
        self.spmd._standing = standing
        if watch:
            self._tell([r.trace for r in replies if r.trace is not None], "cpu")
        return result

    def _replies(self, ask: Callable[[], list[Reply]]) -> list[Reply]:
        try:
            return ask()
        except RankError as error:
            cause = error.__cause__
            if isinstance(cause, RequestError):  # the request was wrong, only found out there
                raise cause from None
            raise

    def _send(self, watch: bool) -> Any:
        for name, tensor in [*((p.name, p.value) for p in self.placed), *self._parameters()]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                raise InputError(
                    f"{name} is on {tensor.device}; started from a plain script, {self.name} runs "
                    "on processes that compute on the CPU: start the script with "
                    f"torchrun --nproc-per-node {self.mesh.size}, one process a device, or move "
                    "it to the CPU"
                )
        pool = _pool(self.mesh, self.spmd._timeout_s)
        if self.objects.modules or self.objects.optimizers or _may_optimize(self.spmd.function):
            _preload_optimizers()
        ambient = Ambient.here()
        request = self._request(ambient=ambient, watch=watch)
        courier = self.spmd._courier
        self.spmd._standing = None
        try:
            with by_value(self.captured.by_value):
                rest = loose(request)
                shipment = pack(request) if rest.num_bytes > MOST_BYTES else None
        except Exception as error:
            arguments = self.spmd.arguments(self.args, self.kwargs)
            raise unsendable(self.name, self.spmd.function, arguments, error) from error
        if not self.spmd._is_known:
            # Third-party modules are imported once in the helper, if ranks are still to be forked.
            _pool(self.mesh, self.spmd._timeout_s, preload=rest.modules())
            self.spmd._is_known = True
        standing = self._standing(request, rest) if shipment is None else None
        if shipment is None:
            replies = self._replies(
                lambda: courier.call(rest, rest.copy_to, pool, ambient=ambient, watch=watch)
            )
        else:
            calls = execute, (shipment,)
            replies = self._replies(lambda: [unpack(s) for s in pool.call(*calls)])
        changes = replies[0].changes
        assert changes is not None
        result = self._home(changes, from_replies(replies, self.mesh.shape))
        self.spmd._standing = standing
        self._tell([r.trace for r in replies if r.trace is not None], "cpu")
        return result

    def _standing(self, request: Request, rest: Loose) -> Standing | None:
        """What lets the next call tell that it is like this one; taken before this one is made."""
        if callable(self.spmd._parameters):  # it may say something else next time
            return None
        try:
            return Standing(self.spmd.function, self.args, self.kwargs, self.objects, request, rest)
        except OpaqueError:
            return None

    def _here(self, world: World, watch: bool) -> Any:
        _check_world(self.mesh, world)
        from autoshard.runtime.spmd.agreement import check_agreement

        tensors = [(f"argument {p.name!r}", p.value) for p in self.placed]
        check_agreement(world, self._description(), tensors, self.modules)
        comm = communicator(self.mesh, self.spmd._timeout_s)
        request = self._request(ambient=None, watch=watch)
        objects, outcome = perform(request, comm)
        pieces, changes = collect(request, objects, outcome.result, outcome.captured, compare=False)
        out = self._home(changes, from_pieces(pieces.found, comm))
        if watch:
            assert outcome.trace is not None
            self._tell(comm.gathered(outcome.trace), world.device.type, is_first=world.rank == 0)
        return out

    def _home(self, changes: Changes, wholes: Any) -> Any:
        schedulers = schedulers_of(self.captured.objects)
        return bring_home(changes, wholes, self.objects, self.tensors, schedulers)

    def _tell(self, traces: list[RankTrace], device: str, *, is_first: bool = True) -> None:
        if not traces:
            return
        call = CallTrace(
            step=trace.next_step() if trace.is_tracing() else 0,
            name=self.name,
            axes=self.mesh.axis_sizes,
            device=device,
            ranks=tuple(traces),
        )
        profiling.tell(call)
        if trace.is_tracing() and is_first:
            trace.log(call)

    # ---- messages ---------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for of, module in self.modules:
            for name, parameter in module.named_parameters():
                yield f"parameter {name!r} of {of}", parameter

    def _description(self) -> str:
        """The call, without the values of tensors."""
        lines = [f"{self.name} on {self.mesh!r}"]
        lines += [
            f"{p.name} {tuple(p.value.shape)} {p.value.dtype} {p.layout}" for p in self.placed
        ]
        lines += [
            f"{a.name} {a.value!r}"
            for a in self.arguments
            if isinstance(a.value, bool | int | float | str | None)
        ]
        for (of, module), cut in zip(self.modules, self.cuts, strict=True):
            lines.append(f"{of} {type(module).__qualname__}")
            lines += [f"{name} {spec.partition_spec}" for name, (_, spec) in cut.items()]
        return "\n".join(lines)


# ---- processes --------------------------------------------------------------------------------


def _pool(mesh: DeviceMesh, timeout_s: float, preload: Sequence[str] = ()) -> Pool:
    _check_local(mesh)
    threads = max(1, torch.get_num_threads() // mesh.size)
    pool = get_pool(mesh.size, threads=threads, preload=preload)
    pool.timeout_s = timeout_s
    return pool


def _check_local(mesh: DeviceMesh) -> None:
    if sorted(mesh.ranks) != list(range(mesh.size)):
        raise MeshError(
            f"{mesh!r} names the devices {sorted(mesh.ranks)}; started from a plain script, a mesh "
            f"has the devices 0 to {mesh.size - 1}, one process each"
        )
    if mesh.size <= 8:
        return
    import psutil

    free = int(psutil.virtual_memory().available)
    if mesh.size * _PROCESS_BYTES > free:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} devices, each of which is a process here and takes some "
            f"{_PROCESS_BYTES // 10**6} MB; {free / 1e9:.1f} GB are free, enough for "
            f"{free // _PROCESS_BYTES}: choose a smaller mesh, or torchrun on more machines"
        )


def _check_world(mesh: DeviceMesh, world: World) -> None:
    world.check_mesh(mesh.shape)
    if mesh.ranks != tuple(range(mesh.size)):
        raise MeshError(
            f"{mesh!r} does not name the ranks in order; under torchrun rank i is the i-th device "
            f"of a mesh: list 0 to {mesh.size - 1} row by row, and name the axes accordingly"
        )


def _may_optimize(function: object) -> bool:
    return bool(names_used(function) & {"optim", "backward", "step", "zero_grad"})


def _preload_optimizers() -> None:
    """Load what the first optimizer of a process loads: once, in the helper, not in each rank."""
    launcher().preload(["torch._dynamo"])


def _warm_up(function: object, mesh: DeviceMesh) -> None:
    """Have the helper process load torch while the caller goes on."""
    if in_world() or under_launcher():
        return
    with contextlib.suppress(AutoshardError, OSError):
        launcher()
        if _may_optimize(function):
            _preload_optimizers()


def spmd(
    *,
    mesh: DeviceMesh,
    in_shardings: InShardings = None,
    out_sharding: OutSharding = None,
    parameter_shardings: ParameterShardings = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    bucket_bytes: int | None = None,
) -> Callable[[Callable[Arguments, Returned]], SpmdFunction[Arguments, Returned]]:
    """Run a function of whole arrays on every device of a mesh.

    >>> mesh = DeviceMesh(devices=[0, 1, 2, 3], axis_names=["data"])
    >>> @spmd(mesh=mesh, in_shardings=[ShardingSpec(mesh, PartitionSpec("data", None))])
    ... def step(model, batch, labels):
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     loss = torch.nn.functional.cross_entropy(model(batch), labels)
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss

    The body is ordinary NumPy or torch, and sees global shapes; communication follows from the
    specs. What the call does to modules, optimizers, schedulers, tensors and random generators is
    there afterwards as after the same call on one device. Results come back whole and detached.

    From a plain script it runs on processes of this machine, started in the background and kept
    between calls; under torchrun on the processes that are there. Lists and objects that the body
    changes otherwise are copies: return what is wanted.

    Args:
        mesh: the devices.
        in_shardings: a spec an argument: a list in order, one entry for each argument that is or
            contains tensors or arrays, or a dict by argument name; an entry is a spec, None
            (whole), or a container of specs. Missing ones are whole. A single spec is for all.
        out_sharding: how results lie before they are put together: one spec for all, or a list
            with one for each tensor in order; None: as they are.
        parameter_shardings: a spec for all parameters, a dict of name patterns (``*`` and ``?``;
            the first that fits), or a function of (name, parameter). None: whole.
        timeout_s: limit of each collective; and seconds after which a call fails in which no rank
            finished or sent anything to another.
        bucket_bytes: gradients are sent in messages of this size; None: from the cost model.

    Raises:
        SpecError: a spec that cannot be.
        MeshError: a mesh that cannot be.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh is {mesh!r}; give a DeviceMesh")
    if timeout_s <= 0:
        raise RequestError(f"timeout_s is {timeout_s}; give seconds, more than 0")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise RequestError(f"bucket_bytes is {bucket_bytes}; give bytes, at least 1")
    check_entries(in_shardings, mesh)
    check_parameters(parameter_shardings, mesh)
    out_layouts(out_sharding, mesh)

    def decorate(function: Callable[Arguments, Returned]) -> SpmdFunction[Arguments, Returned]:
        if isinstance(function, SpmdFunction):
            raise RequestError(f"{function!r} is an @spmd function already; give its .function")
        if not callable(function):
            raise RequestError(f"{function!r} cannot be called; @spmd is for functions")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise RequestError(
                f"{function.__qualname__} is a generator or a coroutine; @spmd is for functions "
                "that return"
            )
        made = SpmdFunction(
            function,
            mesh=mesh,
            in_shardings=in_shardings,
            out_sharding=out_sharding,
            parameter_shardings=parameter_shardings,
            timeout_s=timeout_s,
            options=EagerOptions(bucket_bytes=bucket_bytes),
        )
        _warm_up(function, mesh)
        return made

    return decorate
