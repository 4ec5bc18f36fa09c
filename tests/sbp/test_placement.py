import copy
import pickle
import subprocess
import sys
from dataclasses import replace

from autopar.sbp.placement import I, KeyTuple, P, R, S

LAYOUTS = ((S(0), I), (I, S(1)))


def test_a_key_is_the_tuple_that_it_holds():
    key = KeyTuple(LAYOUTS)
    assert key == LAYOUTS and hash(key) == hash(LAYOUTS) and {LAYOUTS: 1}[key] == 1
    assert key != KeyTuple(LAYOUTS[:1]) and key[0] == LAYOUTS[0]


def test_a_key_of_another_process_has_the_hash_that_it_has_here():
    made = (
        "import pickle, sys; from tests.sbp.test_placement import LAYOUTS; from autopar.sbp.placement import KeyTuple;"
        " key = KeyTuple(LAYOUTS); hash(key); sys.stdout.buffer.write(pickle.dumps(key))"
    )
    sent = subprocess.run([sys.executable, "-c", made], check=True, capture_output=True).stdout
    assert hash(pickle.loads(sent)) == hash(LAYOUTS)


def test_equal_placements_are_one_object_also_after_copies_and_in_order():
    placements = [S(1), S(0, 4), S(0), S(0, 1, (3, 1)), S(0, 1, (), (3, 1)), P, I, R]
    for one in placements:
        assert pickle.loads(pickle.dumps(one)) is copy.deepcopy(one) is replace(one) is one
    assert [*map(str, sorted(placements))] == ["B", "P", "B*", "S(0)", "S(0|3+1)", "S(0:3+1)", "S(0/4)", "S(1)"]
