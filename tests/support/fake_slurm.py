"""A fake SLURM on one machine: the programs that submitit calls start, requeue and list jobs without a queue.

A job is a real process: it runs its script with SLURM's variables in its environment. When it is requeued, the script
starts again under the same job number.
"""

import os
import sys
from pathlib import Path

_SBATCH = '''
"""sbatch <script> [<word> …]: start a job, or every job of an array; keep the script, so that the test can read its #SBATCH lines."""
import os, pathlib, re, subprocess, sys
script = pathlib.Path(sys.argv[1]).resolve()
options = dict(re.findall(r"^#SBATCH --([\\w-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE))
first = 1000 + len(list(STATE.glob("*.sh")))
kept = STATE / f"{first}.sh"
kept.write_text(script.read_text())
of_array = re.match(r"0-(\\d+)", options.get("array", ""))
for number in range(int(of_array[1]) + 1 if of_array else 1):
    name = f"{first}_{number}" if of_array else str(first)
    job = {"SLURM_JOB_ID": str(first + number), "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    job |= {"SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": options.get("ntasks-per-node", "1")}
    job |= {"SLURM_ARRAY_JOB_ID": str(first), "SLURM_ARRAY_TASK_ID": str(number)} if of_array else {}
    job |= {"SLURM_JOB_NAME": options.get("job-name", "job")}
    line = [sys.executable, HERE / "keep_running", kept, name, *sys.argv[2:]]
    away = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(line, env=os.environ | job, start_new_session=True, **away)
print(f"Submitted batch job {first}")
'''
_KEEP_RUNNING = '''
"""keep_running <script> <job> [<word> …]: run a job's script, and again after every requeue."""
import pathlib, subprocess, sys
script, name, *words = sys.argv[1:]
while True:
    (STATE / f"{name}.state").write_text("RUNNING")
    (STATE / f"{name}.requeue").unlink(missing_ok=True)
    code = subprocess.run(["bash", script, *words]).returncode
    if not (STATE / f"{name}.requeue").exists():
        break
(STATE / f"{name}.state").write_text("FAILED" if code else "COMPLETED")
'''
_SRUN = '''
"""srun [--output <file>] [--error <file>] <command>: replace this process by the command."""
import os, sys
words, names = sys.argv[1:], {"%t": "0", "%j": "SLURM_JOB_ID", "%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID"}
while words[0].startswith("--"):
    option = words.pop(0)
    if option in ("--output", "--error"):
        path = words.pop(0)
        for mark, name in names.items():
            path = path.replace(mark, os.environ.get(name, name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1 if option == "--output" else 2)
os.execvp(words[0], words)
'''
_SCONTROL = '''
"""scontrol requeue <job>"""
import sys
assert sys.argv[1] == "requeue"
with (STATE / "requeued").open("a") as file:
    print(sys.argv[2], file=file)
(STATE / f"{sys.argv[2]}.requeue").touch()
'''
_SACCT = '''
"""sacct: every job."""
print("JobID|State|NodeList")
for path in STATE.glob("*.state"):
    print(f"{path.stem}|{path.read_text()}|here")
'''


def install(folder: Path) -> dict[str, str]:
    """Write the programs into a folder; returns the environment in which they hide this machine's own."""
    state, programs = folder / "state", folder / "bin"
    for made in (state, programs):
        made.mkdir(parents=True)
    texts = {"sbatch": _SBATCH, "keep_running": _KEEP_RUNNING, "srun": _SRUN, "scontrol": _SCONTROL, "sacct": _SACCT}
    for name, text in texts.items():
        where = f"from pathlib import Path\nSTATE, HERE = Path({str(state)!r}), Path({str(programs)!r})\n"
        (programs / name).write_text(f"#!{sys.executable}\n{where}{text}")
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}
