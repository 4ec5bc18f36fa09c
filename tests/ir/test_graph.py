import pickle
import subprocess
import sys

import torch

from autopar.ir.graph import Op, Slot, Value

X = Value("x", (4, 8), torch.float32, needs_grad=True)


def relu(name: str, module: str) -> Op:
    inputs, outputs = (X,), (Value(name, (4, 8), torch.float32, needs_grad=True),)
    return Op(name, "aten.relu.default", (Slot(0),), (), inputs, outputs, False, module, "model.py:1")


def test_equal_calls_are_one_object_without_their_names():
    first, second = relu("a", "up"), relu("b", "down")
    assert first != second
    assert first.nameless is second.nameless
    assert first.nameless.nameless is first.nameless


def test_what_an_op_is_asked_once_is_computed_once():
    calls = []

    def count(asked: Op) -> int:
        calls.append(asked)
        return len(calls)

    op = relu("a", "up")
    assert op.once(count) == op.once(count) == 1 and calls == [op]


def test_an_op_of_another_process_has_the_hash_that_it_has_here():
    made = (
        "import pickle, sys; from tests.ir.test_graph import relu; op = relu('a', 'up'); hash(op), op.nameless;"
        " sys.stdout.buffer.write(pickle.dumps(op))"
    )
    sent = subprocess.run([sys.executable, "-c", made], check=True, capture_output=True).stdout
    assert {pickle.loads(sent): "found"}[relu("a", "up")] == "found"
