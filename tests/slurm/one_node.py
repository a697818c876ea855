"""A real Slurm of one node on this machine, without systemd: munged, slurmctld, slurmd.

    python tests/slurm/one_node.py [COMMAND ...]   # run COMMAND (default: a shell) inside it

It needs root and Debian's packages (`make slurm`). Everything lies in one folder and listens on
loopback; CPUs and GPUs are only declared (jobs share the real ones); there are no cgroups and no
accounting; the daemons end with the process that started them.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("munge", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo", "setpriv")
SBIN = ":/usr/local/sbin:/usr/sbin:/sbin"
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a short cred_expire: a requeued job may only start again after it
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=64
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MinJobAge=86400
KillWait=3
CompleteWait=0
InactiveLimit=0
SlurmdTimeout=30
MessageTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory={memory} Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES DefaultTime=10 PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes={host} DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""


def obstacle() -> str | None:
    """Why no Slurm can be started here, or None."""
    path = os.environ["PATH"] + SBIN
    missing = [name for name in (*DAEMONS, *CLIENTS) if not shutil.which(name, path=path)]
    if missing:
        return f"{', '.join(missing)} not installed: make slurm, as root"
    if os.geteuid() != 0:
        return "the Slurm daemons need root"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return "the host's name does not resolve: add it to /etc/hosts"
    return None


class OneNodeSlurm:
    """start() and stop() the cluster; `env` is what a client needs, kill() fells one daemon."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: sockets end at 107 characters
        self.folder.chmod(0o755)
        self.conf = self.folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen] = {}

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        for name in ("state", "spool", "log", "munge"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10 >> 20
        host = socket.gethostname().split(".")[0]
        text = CONF.format(host=host, ports=_free_ports(2), folder=self.folder, memory=memory)
        self.conf.write_text(text)
        # character devices that every Linux has stand in for two GPUs
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        for name in DAEMONS:
            self.start_daemon(name)
        self.wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "an idle node")

    def start_daemon(self, name: str) -> None:
        munge = f"--socket={self.folder}/munge.socket --key-file={self.folder}/munge/key"
        munge += f" --pid-file={self.folder}/munged.pid --log-file={self.folder}/log/munge"
        munge += f" --seed-file={self.folder}/munge/seed --num-threads=2"
        options = {"munged": f"--foreground {munge}", "slurmctld": "-D", "slurmd": "-D"}[name]
        # setpriv: the daemon gets SIGTERM when this process ends, however it ends
        command = ["setpriv", "--pdeathsig", "TERM", name, *options.split()]
        env = {**os.environ, **self.env, "PATH": os.environ["PATH"] + SBIN, "LC_ALL": "C"}
        with open(self.folder / "log" / name, "a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        if name == "munged":
            self.wait((self.folder / "munge.socket").exists, "munged's socket")

    def kill(self, name: str) -> None:
        """kill -9 one daemon."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def ask(self, *command: str) -> str:
        """Output of a client, "" if it fails."""
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30).stdout

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended: {self.logs()}")
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} after {seconds} s: {self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{f.name}:\n{f.read_text()[-1000:]}" for f in files)

    def stop(self) -> None:
        """Kill the jobs, then the daemons, and remove the folder."""
        self.ask("scancel", "--me", "--signal=KILL", "--full")
        self.ask("scancel", "--me")
        end = time.monotonic() + 10
        while self.ask("squeue", "-h") and time.monotonic() < end:
            time.sleep(0.1)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(n: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> None:
    if reason := obstacle():
        sys.exit(f"error: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    slurm = OneNodeSlurm()
    try:
        slurm.start()
        command = sys.argv[1:] or [os.environ.get("SHELL", "/bin/bash")]
        sys.exit(subprocess.run(command, env={**os.environ, **slurm.env}).returncode)
    finally:
        slurm.stop()


if __name__ == "__main__":
    main()
