import pickle
import subprocess
import sys

from autopar.sbp.placement import I, KeyTuple, S

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
