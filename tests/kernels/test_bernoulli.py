"""`bernoulli_` draws torch's numbers and leaves torch's state, whatever was drawn before and however it is laid out."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from accel.kernels import bernoulli
from accel.kernels.bernoulli import bernoulli_, why_not
from accel.kernels.draws import library
from tests.sampling import examples

DTYPES = list(bernoulli._ONES)
pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"not applicable here: {why_not()}")


@pytest.fixture(autouse=True)
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few elements here as well."""
    monkeypatch.setattr(bernoulli, "_FEW", 1)


def both(make: Callable[[], Tensor], p: float, words_before: int = 0, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Fill a tensor here and by torch; the generators must end in one state."""
    drawn = []
    for draw in (bernoulli_, Tensor.bernoulli_):
        generator = Generator().manual_seed(seed)
        torch.empty(words_before, dtype=torch.int32).random_(generator=generator)
        drawn.append((draw(make(), p, generator=generator), generator.get_state()))
    (own, own_state), (plain, plain_state) = drawn
    assert torch.equal(own_state, plain_state)
    return own, plain


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 311, 312, 313, 623, 624, 625, 5000])
def test_the_same_bits_and_state(dtype: torch.dtype, count: int) -> None:
    for words_before in (0, 1, 622, 623, 624, 625):
        own, plain = both(lambda: torch.full((count,), 5).to(dtype), 0.3, words_before)
        assert torch.equal(own, plain)


@settings(max_examples=examples(200))
@given(
    count=st.integers(0, 3000),
    p=st.floats(0, 1),
    words_before=st.integers(0, 1500),
    seed=st.integers(0, 2**63 - 1),
    dtype=st.sampled_from(DTYPES),
)
def test_any_draw_is_torchs(count: int, p: float, words_before: int, seed: int, dtype: torch.dtype) -> None:
    own, plain = both(lambda: torch.empty(count, dtype=dtype), p, words_before, seed)
    assert torch.equal(own, plain)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(3, 5, 7, 2),
    "channels_last": lambda: torch.empty(3, 5, 7, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.empty(50, 70).t(),
    "strided": lambda: torch.empty(100)[::3],
    "part": lambda: torch.empty(10, 10)[2:5],
    "columns": lambda: torch.empty(10, 10)[:, 2:5],
    "scalar": lambda: torch.empty(()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout(name: str) -> None:
    own, plain = both(LAYOUTS[name], 0.4)
    assert torch.equal(own, plain)


def test_nothing_beside_the_elements_is_written() -> None:
    whole = torch.full((100,), 7.0)
    bernoulli_(whole[30:60], 0.5)
    assert (whole[:30] == 7).all() and (whole[60:] == 7).all()
    assert set(whole[30:60].tolist()) == {0.0, 1.0}


def test_the_default_generator_is_torchs() -> None:
    torch.manual_seed(3)
    own, after = bernoulli_(torch.empty(1000), 0.2), torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(own, torch.empty(1000).bernoulli_(0.2))
    assert torch.equal(after, torch.rand(3))


def test_normal_draws_kept_by_the_generator_stay() -> None:
    generator = Generator().manual_seed(1)
    torch.randn(1, generator=generator)  # the second number of the pair waits in the state
    twin = Generator()
    twin.set_state(generator.get_state())
    bernoulli_(torch.empty(500), generator=generator)
    torch.empty(500).bernoulli_(generator=twin)
    assert torch.equal(torch.randn(3, generator=generator), torch.randn(3, generator=twin))


def test_a_mask_that_was_saved_for_backward_may_not_be_filled_anew() -> None:
    """torch counts what is written to a tensor, and was not told: the gradient was that of another mask."""
    x, mask = torch.ones(500, requires_grad=True), bernoulli_(torch.empty(500))
    out = (x * mask).sum()
    bernoulli_(mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()  # type: ignore[no-untyped-call]


def test_a_parameter_is_refused_as_torch_does() -> None:
    parameter = torch.zeros(500, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        bernoulli_(parameter)
    assert not parameter.any()
    with torch.no_grad():
        assert bernoulli_(parameter).any()


def test_what_had_a_gradient_before_it_was_filled_has_none() -> None:
    x = torch.ones(500, requires_grad=True)
    bernoulli_(x * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and not x.grad.any()


def test_what_lies_elsewhere_is_left_to_torch() -> None:
    on_a_device = torch.empty(500, device="meta")
    assert not bernoulli.takes(on_a_device)
    assert bernoulli_(on_a_device) is on_a_device


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_is_between_0_and_1(p: float) -> None:
    with pytest.raises(RuntimeError, match=r"bernoulli_ expects p to be in \[0, 1\]"):
        bernoulli_(torch.empty(10), p)
    with pytest.raises(RuntimeError, match=r"bernoulli_ expects p to be in \[0, 1\]"):
        torch.empty(10).bernoulli_(p)


def test_what_another_thread_draws_meanwhile_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator().manual_seed(7)
    compiled = library.library()
    others: list[Tensor] = []

    class Interrupted:
        @staticmethod
        def accel_bernoulli(*arguments: object) -> int:
            position: int = compiled.accel_bernoulli(*arguments)
            others.append(torch.empty(10).bernoulli_(0.5, generator=generator))
            return position

    monkeypatch.setattr(bernoulli, "library", Interrupted)
    own = bernoulli_(torch.empty(1000), 0.5, generator=generator)
    twin = Generator().manual_seed(7)
    assert torch.equal(others[0], torch.empty(10).bernoulli_(0.5, generator=twin))
    assert torch.equal(own, torch.empty(1000).bernoulli_(0.5, generator=twin))
    assert torch.equal(generator.get_state(), twin.get_state())


def test_while_another_thread_draws_torch_does() -> None:
    generator, twin = Generator().manual_seed(7), Generator().manual_seed(7)
    with bernoulli._lock:
        drawn: list[Tensor] = []
        thread = threading.Thread(
            target=lambda: drawn.append(bernoulli_(torch.empty(100), 0.5, generator=generator)), daemon=True
        )
        thread.start()
        thread.join(30.0)
    assert torch.equal(drawn[0], torch.empty(100).bernoulli_(0.5, generator=twin))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget, before and after the test, what was compiled."""
    cached = (library.compiler, library.library, why_not)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("false", "the C compiler false failed: status 1"),
        ("accel-no-such-compiler", "the C compiler accel-no-such-compiler failed"),
        ("true", "what the C compiler made can't be loaded"),
    ],
)
def test_a_compiler_that_fails_is_said(named: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    assert why_not().startswith(words)


@pytest.mark.usefixtures("forgotten")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert why_not() == "there is no C compiler: neither CC nor cc, gcc, clang"


@pytest.mark.usefixtures("forgotten")
def test_other_numbers_than_torchs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bernoulli._ONES, torch.bfloat16, 0x3F81)
    assert why_not() == "torch draws torch.bfloat16 otherwise on this processor"


def test_it_is_compiled_on_use() -> None:
    code = "import accel.kernels.bernoulli, accel.kernels.draws.library as l; assert not l.library.cache_info().misses"
    subprocess.run([sys.executable, "-c", code], check=True)
