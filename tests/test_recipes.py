"""Recipes: the published one, the small-data one, what may be changed and what is refused."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epcache.errors import ConfigError
from epcache.recipes import (
    OPTIMIZER_NAMES,
    RECIPES,
    SMALL_LEARNING_RATES,
    SMALL_WEIGHT_DECAYS,
    Recipe,
    find_recipe,
    resolve,
)

IMAGENET_ROWS = 1_281_167
CUB_ROWS = 5_994


def test_published_recipe():
    """Batch 4096, rate 0.1 for 256 rows so 1.6, no decay, 10 of 90 epochs of warm-up."""
    recipe = resolve("paper", IMAGENET_ROWS)
    assert recipe.to_json() == {
        "recipe": "paper",
        "optimizer": "lars",
        "epochs": 90,
        "warmup_epochs": 10,
        "batch_size": 4096,
        "steps_per_epoch": 312,
        "train_images": IMAGENET_ROWS,
        "lrs": [1.6],
        "weight_decays": [0.0],
        "label_smoothing": 0.0,
        "drop_last": True,
    }


def test_published_rate_follows_the_batch_and_a_given_one_does_not():
    """The recipe's rate is scaled to another batch size; a rate that is asked for is applied."""
    assert resolve("paper", CUB_ROWS, batch_size=512).lrs == (0.2,)
    assert resolve("paper", CUB_ROWS, batch_size=512, lrs=[0.3, 3]).lrs == (0.3, 3)


def test_small_recipe_on_cub():
    """Some twenty steps an epoch, all rates in one pass, none scaled, two decays."""
    recipe = resolve("small", CUB_ROWS)
    assert recipe.steps_per_epoch == 24
    assert recipe.batch_size == 249
    assert recipe.weight_decays == SMALL_WEIGHT_DECAYS
    assert recipe.lrs == SMALL_LEARNING_RATES
    assert {lr for lr, _ in recipe.grid} == set(SMALL_LEARNING_RATES)


@given(num_rows=st.integers(2, 3_000_000))
def test_small_batches_use_nearly_every_row(num_rows):
    """A tenth of the rows or less where there are enough, never under 16, and few left out."""
    recipe = resolve("small", num_rows)
    size, steps = recipe.batch_size, recipe.steps_per_epoch
    assert size >= min(16, num_rows)
    assert size <= 256 * 9 / 8
    assert size <= num_rows / 10 or num_rows < 16 * 24
    assert 0 <= num_rows - size * steps < steps


@given(num_rows=st.integers(2, 5000), size=st.integers(2, 5000), drop_last=st.booleans())
def test_steps_cover_an_epoch(num_rows, size, drop_last):
    """Dropping the last leaves whole batches; keeping it covers every row without an empty one."""
    size = min(size, num_rows)
    steps = resolve("paper", num_rows, batch_size=size, drop_last=drop_last).steps_per_epoch
    rest = num_rows - steps * size
    assert 0 <= rest < size if drop_last else -size < rest <= 0


def test_published_batch_does_not_fit_small_data():
    """Where there is no whole batch of 4096 the error says both ways out."""
    message = r"batches of 4096 rows and there are 3000 .* 3000 or less, or take recipe small"
    with pytest.raises(ConfigError, match=message):
        resolve("paper", 3000)
    assert resolve("paper", 4096).steps_per_epoch == 1
    assert resolve("paper", 3000, batch_size=3000).steps_per_epoch == 1


def test_shorter_schedule_keeps_the_share_of_warmup():
    """9 epochs of the 90 warm up for one of them; more than 90 epochs, or an own length, do not."""
    assert resolve("paper", IMAGENET_ROWS, epochs=9).warmup_epochs == 1
    assert resolve("paper", IMAGENET_ROWS, epochs=200).warmup_epochs == 10
    assert resolve("paper", IMAGENET_ROWS, epochs=9, warmup_epochs=0).warmup_epochs == 0
    for epochs in range(1, 200):
        resolve("small", CUB_ROWS, epochs=epochs)


def test_every_knob_can_be_set():
    """What is asked for is what the results say."""
    asked = {
        "optimizer": "sgd",
        "epochs": 7,
        "warmup_epochs": 0.5,
        "batch_size": 33,
        "lrs": [0.1, 0.01],
        "weight_decays": [0, 1e-3, 0.05],
        "label_smoothing": 0.1,
        "drop_last": False,
    }
    for name in RECIPES:
        recipe = resolve(name, 100, **asked)
        found = json.loads(json.dumps(recipe.to_json()))
        assert found == {**asked, "recipe": name, "train_images": 100, "steps_per_epoch": 4}
        assert recipe.grid[:3] == ((0.1, 0), (0.1, 1e-3), (0.1, 0.05))
        assert len(recipe.grid) == 6


def test_own_recipe():
    """A recipe need not be one of ours."""
    mine = Recipe(
        name="mine",
        optimizer="adamw",
        epochs=3,
        warmup_epochs=0,
        batch_size=lambda n: n // 2,
        lrs=(0.1,),
        base_batch=100,
    )
    recipe = resolve(mine, 50)
    assert (recipe.name, recipe.batch_size, recipe.lrs) == ("mine", 25, (0.025,))
    for wrong in ({"epochs": 0}, {"base_batch": 0}):
        with pytest.raises(ConfigError, match="must be a whole number of at least 1, got 0"):
            replace(mine, **wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 1}, r"training images .* must be a whole number of at least 2, got 1"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"batch_size": 1}, "batch_size must be a whole number of at least 2, got 1"),
        ({"batch_size": 1001}, "batches of 1001 rows and there are 1000"),
        ({"warmup_epochs": 50}, "warmup_epochs is 50 of 30 epochs; expected less than epochs"),
        ({"warmup_epochs": -1}, "warmup_epochs must be finite and 0 or more, got -1"),
        ({"lrs": []}, "lrs is empty; give at least one value"),
        ({"lrs": [0.1, 0.0]}, "lrs must be above 0, got 0.1, 0"),
        ({"lrs": [-0.1]}, "lrs must be finite and 0 or more, got -0.1"),
        ({"lrs": [math.nan]}, "lrs must be finite and 0 or more, got nan"),
        ({"lrs": ["0.1"]}, "lrs must be a number, got '0.1'"),
        ({"weight_decays": [math.inf]}, "weight_decays must be finite and 0 or more, got inf"),
        ({"weight_decays": []}, "weight_decays is empty"),
        ({"label_smoothing": 1.0}, "label_smoothing must be below 1, got 1.0"),
        ({"optimizer": "sgd"}, "rates for adamw, not for sgd; give learning rates"),
        ({"optimizer": "adam", "lrs": [0.1]}, "unknown optimizer 'adam'; expected one of lars, "),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'; expected one of lars, sgd, adamw"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(changes, message):
    """One line says the value, what was expected and what to do."""
    with pytest.raises(ConfigError, match=message) as caught:
        resolve("small", **{"num_rows": 1000, **changes})
    assert "\n" not in str(caught.value)


def test_unknown_recipe_is_refused():
    """The error lists the names there are."""
    with pytest.raises(ConfigError, match="unknown recipe 'big'; expected one of paper, small"):
        resolve("big", 1000)
    assert all(find_recipe(name).name == name for name in RECIPES)


def test_optimizer_names_are_those_that_can_be_built():
    """The list that needs no torch is the list of optimizers, and their defaults are published."""
    import torch

    from epcache.optim import OPTIMIZERS, make_optimizer

    assert tuple(OPTIMIZERS) == OPTIMIZER_NAMES
    lars = make_optimizer("lars", {"w": torch.ones(1, 2, 2)}, torch.zeros(1))
    assert (lars.momentum, lars.trust_coefficient) == (0.9, 0.001)


def test_listing_recipes_needs_no_torch():
    """Commands name recipes in their help at once."""
    check = "import epcache.recipes, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
