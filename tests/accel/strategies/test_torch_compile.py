"""torch_compile: repeated blocks share one graph, compilations are bounded, and training goes on as without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import entry
from accel.compile import compiled_calls, compiled_draws
from accel.compile.compiled_calls import MOST, layers, leaves, repeated_blocks
from accel.dataio.passes.proxy import Fetching
from accel.guard.draws import ReplayedDraws
from accel.run import Run
from accel.run.gate import Gate
from accel.strategies import torch_compile
from accel.strategies.torch_compile import BLOCKS, REPEATED_SHARE, WHOLE, TorchCompile

WIDTH = 8


class Block(nn.Module):
    def __init__(self, drop: float = 0.0, layer_idx: int = 0) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.drop, self.out = nn.Dropout(drop), nn.Linear(2 * WIDTH, WIDTH)
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.drop(torch.tanh(self.into(self.norm(x)))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Takes (N, length, WIDTH), and gives (N, 3)."""

    def __init__(self, depth: int = 4, drop: float = 0.0, checkpointed: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(drop, number) for number in range(depth))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Counts:
    """A backend in place of TorchInductor: eager PyTorch on the captured graph."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    torch.compiler.reset()
    counting = Counts()
    monkeypatch.setattr(compiled_draws, "compile_fx", counting)
    monkeypatch.setattr(torch_compile, "_no_room", lambda run: "not in tests")
    yield counting
    torch.compiler.reset()


def make(model: nn.Module, *usual: tuple[int, ...], **options: Any) -> tuple[TorchCompile, Run]:
    run = Run(model, [], [], Gate(model, ["torch_compile"]), Fetching(), **options)
    if usual:
        run.observed.call_shapes[usual] = 20
    return TorchCompile(), run


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    out = call(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# -- which blocks repeat -----------------------------------------------------------------------------------------------


def test_layers_of_a_transformer_are_one_group() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    (group,) = repeated_blocks(nn.Sequential(nn.Linear(3, WIDTH), nn.TransformerEncoder(layer, 3)))
    assert [type(block).__name__ for block in group] == ["TransformerEncoderLayer"] * 3


def test_blocks_are_found_in_nested_lists_and_their_place_in_the_model_is_no_difference() -> None:
    stages = nn.ModuleDict({name: nn.ModuleList([Block(layer_idx=0), Block(layer_idx=1)]) for name in "ab"})
    (group,) = repeated_blocks(nn.ModuleList([stages, nn.Linear(2, 2)]))
    assert len(group) == 4


def test_the_outermost_block_that_repeats_is_taken() -> None:
    pairs = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3)))
    assert [len(group) for group in repeated_blocks(pairs)] == [3]


def test_blocks_with_other_numbers_or_shapes_are_other_groups() -> None:
    model = nn.Sequential(*(Block(drop) for drop in (0.1, 0.1, 0.2, 0.2, 0.2)), nn.Sequential(nn.Linear(4, 4)))
    assert [len(group) for group in repeated_blocks(model)] == [2, 3]
    model[1].into = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    assert [len(group) for group in repeated_blocks(model)] == [3]
    model[3].out.weight.requires_grad = False
    assert repeated_blocks(model) == []  # two of five: compiling them could gain little
    assert repeated_blocks(nn.Sequential(*(Block(drop / 10) for drop in range(6)))) == []


@pytest.mark.parametrize("kind", ["single layers", "a small part", "none"])
def test_what_would_gain_little_is_no_block(kind: str) -> None:
    models: dict[str, nn.Module] = {
        "single layers": nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))),
        "a small part": nn.Sequential(Block(), Block(), *(nn.Linear(2, 2) for _ in range(20))),
        "none": nn.Linear(2, 2),
    }
    assert repeated_blocks(models[kind]) == []
    strategy, run = make(models[kind])
    assert strategy.settings(run) == [WHOLE]


def test_a_block_with_hooks_or_a_forward_of_its_own_is_left_as_it_is() -> None:
    model = Stack(5)
    model.blocks[1].norm.register_forward_hook(lambda *_: None)
    model.blocks[2].forward = model.blocks[2].forward  # type: ignore[method-assign]
    assert repeated_blocks(model) == [[model.blocks[number] for number in (0, 3, 4)]]


# -- one graph for all -------------------------------------------------------------------------------------------------


def test_blocks_share_one_graph_and_compute_the_same(backend: Counts) -> None:
    model = Stack(4)
    plain, x = copy.deepcopy(model), torch.randn(2, 5, WIDTH)
    strategy, run = make(model, (2, 5, WIDTH))
    assert strategy.settings(run) == [BLOCKS, WHOLE]
    counters.clear()
    strategy.enable(run, BLOCKS)
    for _ in range(2):
        torch.testing.assert_close(gradients(model, model, x), gradients(plain, plain, x))
    assert (backend.graphs, backend.runs) == (1, 8)
    assert counters["stats"]["unique_graphs"] == 1

    strategy.disable(run)
    strategy.enable(run, BLOCKS)  # in a trial, time and again
    model(x)
    assert backend.graphs == 1
    strategy.disable(run)
    strategy.enable(run, WHOLE)
    torch.testing.assert_close(gradients(model, model, x), gradients(plain, plain, x))
    assert (backend.graphs, backend.runs) == (2, 13)


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_the_model_stays_what_it_was(setting: str, backend: Counts) -> None:
    model, x = Stack(2), torch.randn(2, 5, WIDTH)
    before, keys = [dict(vars(module)) for module in model.modules()], list(model.state_dict())
    strategy, run = make(model)
    strategy.enable(run, setting)
    model(x)
    assert list(model.state_dict()) == keys
    runs = backend.runs
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), run.gate.plain(x))
    assert strategy.refusal(run) == ""
    assert backend.runs == runs  # copies are plain, and so is the plain path
    strategy.disable(run)
    strategy.close(run)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_blocks_of_a_checkpointed_model_do_the_same_when_they_are_called_again(backend: Counts) -> None:
    model = Stack(3, checkpointed=True)
    plain, x = copy.deepcopy(model), torch.randn(2, 5, WIDTH)
    strategy, run = make(model)
    strategy.enable(run, BLOCKS)
    torch.testing.assert_close(gradients(model, model, x), gradients(plain, plain, x))
    assert backend.runs == 6
    torch.testing.assert_close(gradients(model, run.gate.plain, x), gradients(plain, plain, x))
    assert backend.runs == 6


def targeted(model: nn.Module, x: Tensor) -> None:
    """A loss against the output of a call without gradients, which runs plainly."""
    outputs = model(x)
    with torch.no_grad():
        target = model(x[:1])
    (outputs - target).square().sum().backward()


def of_two_sizes(model: nn.Module, x: Tensor) -> None:
    """A loss of two calls, of which one runs plainly."""
    whole, part = model(x), model(x[:1])
    (whole - part).square().sum().backward()


def of_two_sizes_the_other_way(model: nn.Module, x: Tensor) -> None:
    part, whole = model(x[:1]), model(x)
    (whole - part).square().sum().backward()


@pytest.mark.parametrize("step", [targeted, of_two_sizes, of_two_sizes_the_other_way])
def test_checkpointed_blocks_do_the_same_again_whatever_was_called_since(
    step: Callable[[nn.Module, Tensor], None], backend: Counts
) -> None:
    model = Stack(3, checkpointed=True)
    plain, x = copy.deepcopy(model), torch.randn(2, 5, WIDTH)
    strategy, run = make(model, (2, 5, WIDTH))
    strategy.enable(run, BLOCKS)
    for _ in range(2):
        step(model, x)
        step(plain, x)
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad)
    assert backend.runs == 2 * 6  # of the usual size, each made again


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_a_hook_that_comes_later_is_called(setting: str, backend: Counts) -> None:
    model, x, seen = Stack(2), torch.randn(2, 5, WIDTH), list[Tensor]()
    strategy, run = make(model)
    strategy.enable(run, setting)
    model(x)
    runs = backend.runs
    hook = model.blocks[1].out.register_forward_hook(lambda module, args, out: seen.append(out))
    model(x)
    assert len(seen) == 1
    assert backend.runs == runs
    hook.remove()
    model(x)
    assert backend.runs > runs
    assert len(seen) == 1


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_a_hook_that_takes_the_place_of_another_is_called(setting: str, backend: Counts) -> None:
    """Features of an epoch are gathered by a hook of its own: as many hooks as before, and another one."""
    model, x = Stack(2), torch.randn(2, 5, WIDTH)
    seen: list[str] = []
    hook = model.blocks[1].out.register_forward_hook(lambda *_: seen.append("first"))
    strategy, run = make(model)
    strategy.enable(run, setting)
    model(x)
    hook.remove()
    model.blocks[1].out.register_forward_hook(lambda *_: seen.append("second"))
    model(x)
    assert seen == ["first", "second"]


def test_a_model_that_the_loop_compiles_later_is_left_to_it() -> None:
    model, x = Stack(2), torch.randn(2, 5, WIDTH)
    strategy, run = make(model)
    strategy.enable(run, WHOLE)
    model.compile(backend="eager")
    strategy.disable(run)
    assert strategy.refusal(run) == "the model is compiled already"
    model(x)
    other = Stack(2)
    other.blocks[0].compile(backend="eager")
    assert "a part of the model" in TorchCompile().refusal(make(other)[1])


# -- how often it compiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_a_smaller_last_batch_and_evaluation_are_not_compiled_for(setting: str, backend: Counts) -> None:
    model = Stack(3)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, setting)
    model(torch.randn(3, 5, WIDTH))
    assert backend.runs == 0  # whichever comes first
    for size in (4, 4, 3, 4, 1):
        model(torch.randn(size, 5, WIDTH))
    with torch.no_grad():
        model.eval()
        model(torch.randn(4, 5, WIDTH))
    assert backend.graphs == 1
    assert backend.runs == 3 * (3 if setting == BLOCKS else 1)


def test_much_evaluation_is_compiled_for(backend: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(2), torch.randn(4, 5, WIDTH)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, WHOLE)
    readings = iter(range(0, 10_000, 3))  # compiling takes 3 s, and so does each plain call
    monkeypatch.setattr(strategy._calls[WHOLE], "_clock", lambda: float(next(readings)))
    model(x)
    with torch.no_grad():
        for _ in range(21):
            model(x)
        assert backend.graphs == 1
        model(x)
    assert backend.graphs == 2


@pytest.mark.parametrize("setting", [BLOCKS, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_varying_lengths_take_few_graphs(setting: str, backend: Counts) -> None:
    model = Stack(2 if setting == BLOCKS else 1, drop=0.2)
    plain = copy.deepcopy(model)
    strategy, run = make(model)
    run.observed.call_shapes.update(((4, length, WIDTH),) for length in range(3, 12))
    assert run.observed.usual_shapes is None
    strategy.enable(run, setting)
    counters.clear()
    for length in range(3, 12):
        x = torch.randn(4, length, WIDTH)
        with ReplayedDraws(canonical=True):
            expected = gradients(plain, plain, x)
        torch.testing.assert_close(gradients(model, model, x), expected)
    # For the first length, and for all; the first block's input is a view, which torch tells apart then.
    assert counters["stats"]["unique_graphs"] == backend.graphs == (3 if setting == BLOCKS else 2)
    assert strategy.failure(run) == ""


class Restless(Stack):
    """Multiplies by another number in each call, which torch takes for a part of its code."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = f"{float(getattr(self, 'scale', 0)) + 1}"
        return super().forward(x) * len(self.scale) * {"1.0": 1}.get(self.scale, 2)  # type: ignore[no-any-return]


def test_endless_compilation_is_ended_and_said(backend: Counts) -> None:
    model, x = Restless(1), torch.randn(4, 5, WIDTH)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, WHOLE)
    for _ in range(3 * MOST):
        model(x)
    assert backend.graphs == MOST
    assert strategy.failure(run) == (
        f"it was compiled {MOST} times, and again for other values in the model's code: from then on it ran plainly"
    )


# -- in training -------------------------------------------------------------------------------------------------------


def train(model: nn.Module, *, autocast: bool, scaled: bool, canonical: bool) -> dict[str, Tensor]:
    """Train with accumulated, scaled and clipped gradients under an autocast of the loop's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for step in range(12):
        x = torch.randn(4, 5, WIDTH, generator=generator)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            ReplayedDraws(canonical) if canonical else torch.enable_grad(),
        ):
            loss = model(x).float().square().mean() / 3
        scaler.scale(loss).backward()
        if step % 3 == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {**model.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
@pytest.mark.parametrize("amp", [False, True])
def test_dropout_accumulation_clipping_and_amp_train_the_same(setting: str, amp: bool, backend: Counts) -> None:
    expected = train(Stack(3, drop=0.3), autocast=amp, scaled=amp, canonical=True)
    model = Stack(3, drop=0.3)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, setting)
    actual = train(model, autocast=amp, scaled=amp, canonical=False)
    assert backend.graphs == 1
    assert torch.equal(actual.pop("random"), expected.pop("random"))
    torch.testing.assert_close(actual, expected, **({"rtol": 0.02, "atol": 2e-3} if amp else {}))


# -- what it is expected to take ---------------------------------------------------------------------------------------


def test_fewer_layers_are_expected_to_compile_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, run = make(Stack(12), (4, 5, WIDTH))
    assert leaves(run.model) == 12 * 4 + 2
    assert layers([run.model]) == (4 + 2, 11 * 4)
    blocks, whole = (strategy.compiling_s(run, setting) for setting in (BLOCKS, WHOLE))
    assert 0 < blocks < 0.5 * whole
    assert strategy.compiling_s(run, None) == whole  # of a plan of an earlier version
    run.observed.call_shapes.update({((4, 6, WIDTH),): 20})
    assert strategy.compiling_s(run, WHOLE) == 2 * whole
    monkeypatch.setattr(torch_compile, "_no_room", lambda run: "")
    assert strategy.compiling_s(run, WHOLE) == pytest.approx(2 * whole * REPEATED_SHARE)


def test_shapes_are_learnt_anew_when_the_usual_batch_changes(backend: Counts) -> None:
    model = Stack(2)
    strategy, run = make(model, (4, 5, WIDTH))
    run.observed.note_batch("small")
    strategy.enable(run, BLOCKS)
    model(torch.randn(4, 5, WIDTH))
    strategy.disable(run)

    run.observed.note_batch("large")
    assert run.observed.usual_shapes is None
    run.observed.note_call((torch.randn(8, 5, WIDTH),), {}, run.device)
    assert run.observed.usual_shapes == ((8, 5, WIDTH),)
    strategy.enable(run, BLOCKS)
    for _ in range(2):
        model(torch.randn(8, 5, WIDTH))
    assert (backend.graphs, backend.runs) == (2, 2 + 4)


# -- loops that it is not for ------------------------------------------------------------------------------------------


def penalised(model: nn.Module, x: Tensor) -> None:
    """Penalise the gradient of the inputs, as critics are trained."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().sum() + gradient.square().sum()).backward()


def twice(model: nn.Module, x: Tensor) -> None:
    out = model(x)
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def once(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


@pytest.mark.parametrize(
    ("step", "refusal"), [(penalised, "differentiates gradients again"), (twice, "twice"), (once, "")]
)
def test_a_loop_that_uses_a_graph_again_is_not_compiled(step: Any, refusal: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2))
    model, loader = accel.optimize(model, DataLoader(TensorDataset(torch.randn(40, 4)), 4), budget=60, cache=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for (x,) in loader:
        optimizer.zero_grad()
        step(model, x)
        optimizer.step()
    session = entry.MODELS[model].session
    assert refusal in session.strategies["torch_compile"].refusal(session.run)
    assert bool(refusal) == bool(session.strategies["torch_compile"].refusal(session.run))


def test_an_output_that_is_a_parameter_keeps_no_hook() -> None:
    model = nn.Linear(2, 2)
    _, run = make(model)
    run.observed.note_outputs((model.weight, model(torch.ones(1, 2))))
    assert not model.weight._backward_hooks


# -- loops that pack what is saved -------------------------------------------------------------------------------------


def packed() -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks that keep what is saved as arrays, in no other strides than an array's own."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy)


def test_a_loop_that_packs_what_is_saved_is_refused() -> None:
    model, x = Stack(2), torch.randn(2, 5, WIDTH)
    strategy, run = make(model, (2, 5, WIDTH))
    run.observed.note_outputs(model(x))
    assert strategy.refusal(run) == ""
    for hooks in (packed(), torch.autograd.graph.save_on_cpu()):
        run.observed.needs_graphs = ""
        with hooks:
            run.observed.note_outputs(model(x))
        assert "saved_tensors_hooks" in strategy.refusal(run)


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_a_call_whose_saved_tensors_are_packed_runs_plainly(setting: str, backend: Counts) -> None:
    model, x = Stack(2), torch.randn(2, 5, WIDTH)
    plain = copy.deepcopy(model)
    strategy, run = make(model, (2, 5, WIDTH))
    strategy.enable(run, setting)
    gradients(model, model, x)
    runs = backend.runs
    with packed():
        own = gradients(model, model, x)
    assert backend.runs == runs > 0
    with packed():
        expected = gradients(plain, plain, x)
    assert all(map(torch.equal, own, expected))
    gradients(model, model, x)
    assert backend.runs == 2 * runs


@pytest.mark.parametrize("setting", [BLOCKS, WHOLE])
def test_a_layer_that_is_unfrozen_trains(setting: str, backend: Counts) -> None:
    """Where Dynamo's guards pass by a dictionary of parameters it never got a gradient (torch 2.9 to 2.11)."""
    model, x = Stack(), torch.randn(4, 5, WIDTH)
    for block in model.blocks:
        block.into.requires_grad_(False)  # type: ignore[union-attr]
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, setting)
    model(x).sum().backward()
    runs = backend.runs
    assert runs
    for block in model.blocks:
        block.into.requires_grad_(True)  # type: ignore[union-attr]
    model(x).sum().backward()
    assert backend.runs == runs  # it ran plainly
    assert all(block.into.weight.grad is not None for block in model.blocks)  # type: ignore[union-attr]


def test_blocks_are_compiled_within_the_models_call_only(backend: Counts) -> None:
    model, x = Stack(), torch.randn(4, 5, WIDTH)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, BLOCKS)
    model(x).sum().backward()
    runs, seen = backend.runs, list[Any]()
    handle = model.blocks[0].into.register_forward_hook(lambda *given: seen.append(1))  # type: ignore[union-attr]
    model.blocks[0](model.embed(x))
    handle.remove()
    assert (backend.runs, seen) == (runs, [1])
    model(x)
    assert backend.runs > runs


def test_no_helper_compiles_what_lies_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = Stack()
    model.register_buffer("adjacency", torch.eye(3).to_sparse())  # which has no memory to share
    assert "shared" not in torch_compile._no_room(make(model, cores=64)[1])
    _, run = make(Stack().share_memory(), cores=64)
    assert torch_compile._no_room(run) == "the model lies in shared memory, which a helper process would write to"


def test_where_the_loop_trains_other_parameters_for_good_it_says_so(
    backend: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_calls, "_MOST_OTHERS", 3)
    model, x = Stack(), torch.randn(4, 5, WIDTH)
    model.embed.requires_grad_(False)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, BLOCKS)
    model(x).sum().backward()
    model.embed.requires_grad_(True)
    for _ in range(3):
        assert strategy.failure(run) == ""
        model(x).sum().backward()
    assert strategy.failure(run) == "the loop trains other parameters now than when it was compiled"


def test_a_method_that_calls_checkpointed_blocks_beside_the_models_call(backend: Counts) -> None:
    """Their backward pass makes both again, and must find what the forward pass did."""
    model, x = Stack(checkpointed=True), torch.randn(4, 5, WIDTH)
    plain = copy.deepcopy(model)
    strategy, run = make(model, (4, 5, WIDTH))
    strategy.enable(run, BLOCKS)
    for _ in range(2):
        for each in (model, plain):
            beside = checkpoint(each.blocks[0], each.embed(x), use_reentrant=False)
            (each(x).sum() + checkpoint(each.blocks[1], beside, use_reentrant=False).sum()).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
