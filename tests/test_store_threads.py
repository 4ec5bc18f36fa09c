"""A script ends with status 0 while threads of autopar talk to the store."""

import subprocess
import sys

SCRIPT = """
import sys, time
import torch.distributed as dist
from autopar import store_threads

store = dist.FileStore(sys.argv[1], 1)

def asks():
    while not store_threads.ends_within(0.0):
        for _ in range(1000):
            store.check(["key"])

store_threads.start(asks, name="asks")
time.sleep(0.3)
"""


def test_a_script_ends_while_a_thread_is_inside_a_call_of_the_store(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
