"""Where a run executes: the processes that share it, its device and precision, its signals."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from errors import UserError

STRAY = "in the environment are of no torchrun or srun; unset them"


@dataclass(frozen=True)
class Place:
    """This process among those that train together, its device, and the precision."""

    rank: int = 0
    size: int = 1
    local: int = 0  # rank on this machine: picks the GPU
    device: torch.device = torch.device("cpu")
    dtype: str = "float32"
    matmul: str = "highest"  # torch's float32 matmul precision; training/numerics.py
    compile: bool = False

    def autocast(self):
        if self.dtype != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


class Interrupted(Exception):
    """A signal stopped the run after a checkpoint was saved; the same command goes on from it."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"{signal.Signals(signum).name} at step {step}; saved, run again to go on")
        self.signum = signum
        self.exit_code = 130 if signum == signal.SIGINT else 75


def find_place(device: str = "auto", dtype: str = "auto") -> Place:
    """Rank and size from torchrun's environment or srun's; device and precision as asked for.

    device: auto, cpu, cuda or cuda:N; dtype: auto, float32, bfloat16 (autocast) or float64.
    """
    env = os.environ
    if "WORLD_SIZE" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        first = env["SLURM_STEP_NODELIST"]
        if "[" in first or "," in first:
            command = ["scontrol", "show", "hostnames", first]
            first = subprocess.check_output(command, text=True).split()[0]
        env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"]}
        env |= {"LOCAL_RANK": env["SLURM_LOCALID"], "MASTER_ADDR": first}
        env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
    rank, size, local = env_number("RANK"), env_number("WORLD_SIZE", 1), env_number("LOCAL_RANK")
    if rank >= size:
        raise UserError(f"RANK {rank} and WORLD_SIZE {size} {STRAY}")
    chosen = pick_device(device, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # pinned copies and NCCL then stay off the other GPUs
    return Place(rank, size, local, chosen, pick_dtype(dtype, chosen))


def env_number(name: str, default: int = 0) -> int:
    """A count that torchrun or srun has put into the environment."""
    value = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,6}", value):
        raise UserError(f"{name} is {value!r} in the environment; unset it, or make it a number")
    return int(value)


def pick_device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name}, but torch finds no CUDA here; use --device cpu")
    if name == "cuda":
        name = f"cuda:{local % torch.cuda.device_count()}"
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise UserError(f"device is {name}; this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> str:
    """auto: bfloat16 on GPUs that have it, else float32 (bfloat16 is slower on small CPU runs)."""
    if name != "auto":
        return name
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has else "float32"


@contextmanager
def process_group(place: Place) -> Iterator[None]:
    """torch.distributed for the length of a run, if there are several processes."""
    if place.size == 1 or dist.is_initialized():
        yield
        return
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(f"RANK {place.rank} and WORLD_SIZE {place.size} {STRAY}")
    dist.init_process_group("nccl" if place.device.type == "cuda" else "gloo")
    try:
        yield
    except Interrupted:  # every process is here
        dist.destroy_process_group()
        raise
    # not after an error: the others may be gone, and ending the process is what frees them
    dist.destroy_process_group()


def share(value: object, place: Place) -> object:
    """Process 0's value, in every process."""
    if place.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=place.device)
    return box[0]


def mean_over_processes(value: torch.Tensor, place: Place) -> torch.Tensor:
    if place.size > 1:
        dist.all_reduce(value)
        value /= place.size
    return value


def max_over_processes(number: int, place: Place) -> int:
    if place.size == 1:
        return number
    value = torch.tensor(number, device=place.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def barrier(place: Place) -> None:
    if place.size > 1:
        dist.barrier()


def on_device(batch: tuple[torch.Tensor, ...], place: Place) -> tuple[torch.Tensor, ...]:
    if place.device.type == "cpu":
        return batch
    return tuple(t.pin_memory().to(place.device, non_blocking=True) for t in batch)


@contextmanager
def catch_signals() -> Iterator[dict]:
    """{"signum": 0} that SIGTERM, SIGUSR1, SIGUSR2 and SIGINT set; a second SIGINT raises.

    Python lets only the main thread set handlers; in another one signals are left alone.
    """
    caught = {"signum": 0}
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(signum, frame) -> None:
        if signum == caught["signum"] == signal.SIGINT:
            raise KeyboardInterrupt
        caught["signum"] = signum

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    previous = {number: signal.signal(number, note) for number in signals}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
