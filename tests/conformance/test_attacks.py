"""Random combinations of models, data, optimizers, distributions, options and calls give the numbers of one device.

A few draws run here. `python -m support.attack --count 500`, in the folder `tests`, runs as many as there is time for.
"""

import pytest
from support.attack import draws, script, verdicts
from support.slow_cases import slow_unless

HEAD = "import keras, keras_dist as kd, numpy as np\n"
ENDS = {
    "equal": "expected = found = 1",
    "invalid": "expected = keras.ops.reshape(keras.ops.ones(3), (2, 2))",
    "refused": "expected = 1; kd.create_device_mesh('data:3,model:5')",
    "wrong number": "expected, found = 1, 2; np.testing.assert_equal(expected, found)",
    "internal error": "expected = 1; keras.ops.reshape(keras.ops.ones(3), (2, 2))",
}
# One for each strategy, of those that run quickest.
NUMBERS = (1, 5, 10, 11, 13, 14, 15, 19, 29, 31, 50)
FAST = (5,)


@pytest.mark.parametrize("number", [slow_unless(number in FAST, number) for number in NUMBERS])
def test_a_draw_gives_the_numbers_of_one_device(number):
    source = script.render(draws.draw(0, number))
    verdict = verdicts.judge(source)
    assert verdict.kind == "equal", f"{verdict}\n{source}"


@pytest.mark.slow
def test_a_small_difference_is_a_wrong_number():
    source = script.render(draws.draw(0, 1))
    changed = source.replace("found = run(distribution())", "x = 1.001 * x; found = run(distribution()); x = x / 1.001")
    assert changed != source
    verdict = verdicts.judge(changed)
    assert verdict.kind == "wrong number", verdict
    assert "rounding explains" in verdict.text


def test_there_is_a_draw_for_each_strategy_and_none_needs_64_bits():
    drawn = [draws.draw(0, number) for number in NUMBERS]
    assert {each.strategy for each in drawn} == set(draws.STRATEGIES)
    assert not any(each.is_x64 for each in drawn)


@pytest.mark.parametrize("kind", ENDS)
def test_verdicts(kind):
    verdict = verdicts.judge(HEAD + ENDS[kind])
    assert verdict.kind == kind, verdict
    assert verdict.is_fault == (kind in ("wrong number", "internal error"))
    assert (verdict.place == "axes.py: solve_axes") == (kind == "refused"), verdict


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_ends_or_holds_the_process_is_a_verdict_too():
    sources = {
        "ends": "import os; os.abort()",
        "waits": "import time; time.sleep(1e6)",
        "after": "expected = found = 1",
        "64 bits": "import jax; jax.config.update('jax_enable_x64', True)",
    }
    kinds = {name: verdict.kind for name, verdict in verdicts.judge_all(sources, time_limit=5)}
    assert kinds == {"ends": "abort", "waits": "timeout", "after": "equal", "64 bits": "equal"}


def test_a_draw_depends_on_its_seed_and_number_only():
    assert draws.draw(3, 5) == draws.draw(3, 5)
    scripts = {script.render(draws.draw(seed, number)) for seed in (0, 1) for number in range(30)}
    assert len(scripts) == 60
    for source in scripts:
        compile(source, "draw", "exec")
