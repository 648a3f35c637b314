"""Run on 8 forced host devices: prints, as JSON, what distributed NorMuon communicates and how far it is from the
undistributed one. `test_normuon_distribution` judges it."""

from __future__ import annotations

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effml.optimize import Distribution, scale_by_normuon

KINDS = "all-reduce|all-to-all|all-gather|reduce-scatter|collective-permute"


def collectives(text):
    """kind -> result shapes of each, and how many of them lie outside the entry computation."""
    found, inner, entry = {}, 0, False
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?\S+ \(.*-> .*\{$", line):
            entry = line.startswith("ENTRY")
        if match := re.search(rf"= (.*?) ({KINDS})(-start)?\(", line):
            found.setdefault(match[2], []).append(match[1])
            inner += not entry
    return found, inner


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def gradients(shapes, seed=0):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def prepared(tree, placed, distribution, **options):
    """The distributed transformation with its gradient and state on the mesh, and what it warned about."""
    transform = scale_by_normuon(distribute=distribution, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = transform.init(tree)
    on = lambda leaf, spec: jax.device_put(leaf, NamedSharding(distribution.mesh, spec))
    is_spec = lambda x: isinstance(x, P)
    place = lambda values: jax.tree.map(on, values, placed, is_leaf=is_spec)
    row_spec = lambda row, spec: P(*(name if size > 1 else None for name, size in zip(spec, row.shape)))
    state = state._replace(
        count=on(state.count, P()),
        mu=place(state.mu),
        nu=jax.tree.map(on, state.nu, jax.tree.map(row_spec, state.nu, placed, is_leaf=is_spec)),
    )
    return transform, place, state, [str(warning.message) for warning in caught]


def measure(shapes, placed, distribution, steps=2, **options):
    """The compiled update's collectives and its largest difference from one device after some steps."""
    alone = scale_by_normuon(**options)
    trees = [gradients(shapes, seed) for seed in range(steps)]
    shared, place, state, warned = prepared(trees[0], placed, distribution, **options)
    shardings = jax.tree.map(lambda x: x.sharding, (place(trees[0]), state))
    step = jax.jit(shared.update, out_shardings=shardings, compiler_options=QUICK)
    step = step.lower(place(trees[0]), state).compile()
    reference = jax.jit(alone.update, compiler_options=QUICK)
    expected, difference = alone.init(trees[0]), 0.0
    for tree in trees:
        one, expected = reference(tree, expected)
        other, state = step(place(tree), state)
        pairs = zip(jax.tree.leaves((one, expected)), jax.tree.leaves((other, state)))
        difference = max(difference, *(float(jnp.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
    found, inner = collectives(step.as_text())
    return {"difference": difference, "found": found, "inner": inner, "warnings": warned}


def main():
    assert len(jax.devices()) == 8, jax.devices()
    line, grid = mesh(fsdp=8), mesh(data=2, fsdp=4)
    out = {}

    def case(name, tree, placed=None, mesh=line, options=(), **distribution):
        shapes = {key: {"kernel": shape} for key, (shape, _) in tree.items()}
        specs = {key: {"kernel": spec} for key, (_, spec) in tree.items()}
        placed = specs if placed is None else {key: {"kernel": placed} for key in tree}
        distribution = Distribution(mesh, specs=specs, **distribution)
        out[name] = measure(shapes, placed, distribution, **dict(options))

    twelve = lambda spec: {f"a{index:02}": ((16, 24), spec) for index in range(12)}
    case("outputs", twelve(P(None, "fsdp")))
    case("inputs", twelve(P("fsdp", None)), options={"rescale": "preserve"})
    case("constraint", twelve(P(None, "fsdp")), mode="constraint")
    many = {
        "layers": ((12, 16, 32), P(None, None, "fsdp")),
        "query": ((16, 8, 4), P(None, "fsdp", None)),
        "out": ((8, 4, 16), P(None, None, "fsdp")),
        "tall": ((40, 24), P("fsdp", None)),
        "conv": ((3, 3, 4, 16), P(None, None, None, "fsdp")),
    }
    case("many shapes", many, options={"v_floor": 0.5, "neuron_axis": "longer"})
    uneven = {
        **{f"a{index}": ((24, 20), P(None, "fsdp")) for index in range(3)},
        **{f"b{index}": ((20, 24), P("fsdp", None)) for index in range(3)},
    }
    case("uneven sizes", uneven, placed=P())
    whole = {
        **{f"a{index}": ((24, 20), P(None, None)) for index in range(3)},
        "experts": ((8, 16, 24), P("fsdp", None, None)),
    }
    case("whole matrices", whole)
    five = lambda split: {f"a{index}": ((16, 24), P(None, split)) for index in range(5)}
    case("spread", five("fsdp"), mesh=grid, spread=("data",))
    case("two mesh axes", five(("data", "fsdp")), mesh=grid, axis=("data", "fsdp"))

    tree = gradients({"a": (16, 24)})
    for name, spec in (("both axes", P("data", "fsdp")), ("other axis", P("data", None))):
        *_, warned = prepared(tree, {"a": spec}, Distribution(grid, specs={"a": spec}))
        out[name] = {"warnings": warned}
    elsewhere = {"a": NamedSharding(mesh(other=8), P("other", None))}
    *_, warned = prepared(tree, {"a": P()}, Distribution(line, specs=elsewhere))
    out["other mesh"] = {"warnings": warned}

    alone = scale_by_normuon()
    place = lambda leaf: jax.device_put(
        leaf, NamedSharding(line, P(None, "fsdp") if leaf.shape == (16, 24) else P())
    )
    left = jax.tree.map(place, (tree, alone.init(tree)))
    text = jax.jit(alone.update, compiler_options=QUICK).lower(*left).compile().as_text()
    out["left to the compiler"] = {"inner": collectives(text)[1]}

    spec = {"a": P(None, "fsdp")}
    shared, place, state, _ = prepared(tree, spec, Distribution(line), ns_dtype=jnp.bfloat16)
    text = jax.jit(shared.update).lower(place(tree), state).as_text()
    out["bfloat16"] = re.findall(r"all_to_all.*?-> tensor<\S*x(\w+)>", text)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
