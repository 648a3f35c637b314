"""Arguments of another type are named by the library itself, where no type checker looks at the call first."""

import subprocess
import sys

CALLS = """
import functools, types
import jax, numpy as np
from effml import decode
from effml.decode import SamplingConfig, esp
from effml.nn.transformer import TransformerConfig, forward, init_params

config = TransformerConfig(61, 8, 1, 2, 8)
model = types.SimpleNamespace(
    config=config,
    params=init_params(jax.random.key(0), config),
    forward=functools.partial(forward, config=config),
)
drawn = SamplingConfig(temperature=1.0)

def call(module, name="generate", **given):
    rows = [1, 2] if name == "stream" else [[1, 2]]
    arguments = {"max_new_tokens": 4, **given}
    found = getattr(module, name)(arguments.pop("model", model), arguments.pop("rows", rows), **arguments)
    return list(found) if name == "stream" else found

both = [
    ("model='NoneType'", dict(model=None)),
    ("sampling='greedy'", dict(sampling="greedy")),
    ("key=0", dict(sampling=drawn, key=0)),
    ("keys of shape (2,)", dict(sampling=drawn, key=jax.random.split(jax.random.key(0), 2))),
    ("stop_ids=5", dict(stop_ids=5)),
    ("stop_ids=[2.5]", dict(stop_ids=[2.5])),
    ("max_new_tokens=2.5", dict(max_new_tokens=2.5)),
    ("pad_prompts", dict(rows=[[1, 2], [3]])),
    ("chunk=2.5", dict(name="stream", chunk=2.5)),
]
cases = [(named, functools.partial(call, module, **given)) for module in (decode, esp) for named, given in both]
cases += [
    (named, functools.partial(call, esp, **given))
    for named, given in [
        ("config={'num_masks': 1}", dict(config={"num_masks": 1})),
        ("drafter='lookup'", dict(drafter="lookup")),
        ("given='x'", dict(given="x")),
        ("given=[[1.0], [2.0, 3.0]]", dict(given=[[1.0], [2.0, 3.0]])),
        ("block_size='8'", dict(block_size="8")),
    ]
]
cases += [
    (named, functools.partial(esp.ESPConfig, **given))
    for named, given in [
        ("ema='0.1'", dict(ema="0.1")),
        ("ema=True", dict(ema=True)),
        ("sigmas='5'", dict(sigmas="5")),
        ("tie_tolerance=None", dict(tie_tolerance=None)),
        ("prune_repeats='no'", dict(prune_repeats="no")),
        ("strict=1", dict(strict=1)),
        ("mask_init=array", dict(mask_init=np.zeros(3))),
        ("widths=4", dict(widths=4)),
    ]
]
cases += [
    (named, functools.partial(SamplingConfig, **given))
    for named, given in [
        ("temperature='1'", dict(temperature="1")),
        ("top_p='0.5'", dict(temperature=1.0, top_p="0.5")),
        ("top_k=2.5", dict(temperature=1.0, top_k=2.5)),
        ("top_k=True", dict(temperature=1.0, top_k=True)),
    ]
]
for named, run in cases:
    try:
        run()
    except (TypeError, ValueError) as error:
        if named not in str(error):
            print("for", named, "it says", type(error).__name__, error)
    except Exception as error:
        print("for", named, "there is", type(error).__name__, error)
    else:
        print(named, "is let through")
"""


def test_arguments_of_another_type_are_named():
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""
