"""Distributed tensors: two real processes over gloo."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")
SOURCE = WORKER.parents[2] / "src"

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def run_two(case, tmp_path, timeout=100):
    """Run a case of the worker in two processes; gives their exit codes and what they wrote."""
    file = tmp_path / "rendezvous"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(file), case],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [worker.returncode for worker in workers], outputs


def test_distributed_tensors(tmp_path):
    """T-1, T-5, T-6, T-9, J-10: DTensor programs equal eager ones, and so does DistributedDataParallel"""
    cases = (
        "inputs,tensor_parallel,attention,sequence_parallel,gathered_weights,buffer,partial,second_order,data_parallel"
    )
    codes, outputs = run_two(cases, tmp_path)
    assert codes == [0, 0], "\n".join(outputs)


def test_data_parallel_and_sharded_modules(tmp_path):
    """A compiled DistributedDataParallel module, and fully_shard around compiled modules, equal eager ones"""
    codes, outputs = run_two("whole_data_parallel,fully_sharded", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)


def test_a_rank_that_fails(tmp_path):
    """A clear error on the rank where it happened, and no hang"""
    codes, outputs = run_two("failing", tmp_path)
    assert "this rank fails" in outputs[1] and codes[1] != 0
    assert codes[0] != 0, outputs[0]


def test_a_compiler_that_fails_on_one_rank(tmp_path):
    """A clear error on the rank where it happened, and no hang"""
    codes, outputs = run_two("failing_compiler", tmp_path)
    assert "this compiler fails" in outputs[1] and codes[1] != 0
    assert codes[0] != 0, outputs[0]


def test_a_process_group_that_is_gone(tmp_path):
    """A clear error, and no hang"""
    codes, outputs = run_two("group_gone", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    assert all(output.count("raised: Could not resolve the process group") == 3 for output in outputs)
