"""What a user typed wrong: each command line is refused in one line with an exit code, and nothing is written.

A row is a command line and the start of its error, in which `…` stands for any text; `␣` is a blank within a word. All rows run in
this process, in one folder that holds what `world` makes.
"""

import re
import sys
from types import ModuleType

import pytest

from tests.choice.trainings import write_training
from tests.cli.conftest import contents
from tests.support.command_lines import answer
from tests.support.synthetic_runs import write_run
from tests.support.systems import SYSTEM

RUN_EACH = "got several values, takes one; write one command for each value"
OF_SWEEP = "hydra.run.dir: is the folder of a single run; for a sweep write hydra.sweep.dir=…"
ONE_CHOICE = "takes one choice; write -m model=a,b"
ONLY_SEARCHED = "optimized_metric: is for a sweeper that searches; write batchscope train -m hydra/sweeper=optuna …"
TOO_LONG = "/".join(["x" * 250] * 20)  # for the system; as a folder that may not be entered, which root can enter
SEARCHER = "+callbacks.bsf._target_=lightning.pytorch.callbacks.BatchSizeFinder"
# of experiment=time_to_target
TARGETS = {
    "": "target: has no value; write target=…",
    "target=98": "target: got 98, and val/acc is a fraction between 0 and 1; write target=0.98",
    "target=0.9 target_metric=test/acc": "target_metric: got 'test/acc', takes a metric of the validation",
    "target=0.9 search.sizes=[]": "experiment=time_to_target: needs search.sizes and search.rates, and a training with",
    "target=0.9 data={batch_size:16}": "data.batch_size: experiment=time_to_target tries several; write search.sizes=",
    "target=0.9 data.batch_size=16": "data.batch_size: experiment=time_to_target tries several; write search.sizes=",
    "target=0.9 callbacks.stop_at_target=null": "experiment=time_to_target: needs search.sizes and search.rates, and a training with",
    "target=0.9 search.minutes=0": "search.minutes: got 0, takes a number above 0",
}
# every command takes the flag
EVERYWHERE = {"run": " file", "report": " a", "compare": " a b", "choose": " sweep", "explain": " a", "new": " mine"}
EVERYWHERE |= dict.fromkeys(("hardware", "evaluate", "predict", "export", "latency"), "")
# exit code 1
REFUSED = {
    # a name that there is not
    "train modle=cnn": "modle: no such option. Did you mean 'model'?",
    "train data.batch_sise=3": "data.batch_sise: no such option. Did you mean 'batch_size'?",
    "train ~data.batch_sise": "data.batch_sise: Could not delete from config. 'data.batch_sise' does not exist.",
    "train +trainer.max_epoch=3": "trainer.max_epoch: no such option. Did you mean 'max_epochs'?",
    "train +trainer.logger=false": "trainer.logger: takes null; logger=… takes the loggers, and logger=none leaves them out",
    "train +trainer.callbacks=[]": "trainer.callbacks: takes null; '+callbacks.NAME={_target_: …}' adds one",
    "train optimizer._target_=torch.optim.Adamax optimizer.fused=null": "optimizer.fused: no such option. optimizer takes lr",
    "train optimizer=sgd optimizer.betas=[0.9,0.999]": "optimizer.betas: no such option. optimizer takes lr",
    "train data=digits data.offline=error": "data.offline: no such option. data takes batch_size",
    "train +batch_size=3": "batch_size: no such option. Did you mean 'data.batch_size'?",
    "train trainer.lr=0.1": "trainer.lr: no such option.",
    "train checkpoint.every_minutes=3": "checkpoint.every_minutes: … Did you mean 'callbacks.checkpoint.every_minutes'?",
    "train -m task.max_batch_siz=3,4": "task.max_batch_siz: no such option. task takes",
    "train hydra.swep.dir=x": "hydra.swep.dir: Could not override 'hydra.swep.dir'.",
    "train margin=0": "margin: got 0, takes a number above 0, at most 1",
    "train search.start=3": "search.start: no such option. search is no section.",
    "train seed.foo=3": "seed.foo: no such option. seed is no section.",
    "train --help modle=cnn": "modle: no such option. Did you mean 'model'?",
    # a choice
    "train experiment=adding experiment=diagnose": "experiment: is written 2 times; write 'experiment=[adding,diagnose]'",
    "train experiment=[adding,throughput] experiment=diagnose": "experiment: is written 2 times; write 'experiment=[adding,throughput,diagnose]'",
    "train model=foo": "model: got 'foo', takes cnn, lstm_cell, mlp, rnn_cell, stacked_lstm, torchvision",
    "train model=cn": "model: got 'cn', … Did you mean 'cnn'?",
    "train model=simplecnn": "model: got 'simplecnn', … Did you mean 'cnn'?",
    "train model={a:1}": "model",
    "train model._target_=null": "model._target_: is missing; it names the class to build",
    "train data=nan": "data: got 'nan', takes adding, cifar10, copy_memory",
    "train -m data=mnist,nan": "data: got 'nan', takes adding, cifar10, copy_memory",
    "train data=MNIST": "data: got 'MNIST', … Did you mean 'mnist'?",
    "train callbacks=[early_stopping,5]": "callbacks: got '[early_stopping,5]', takes default, early_stopping",
    "train callbacks=[{_target_:mine.Own}]": "callbacks: got '[{_target_:mine.Own}]', takes default, early_stopping",
    "train model=null": "model: got null, takes cnn",
    "train ~model": "model: got null, takes cnn",
    "train model=[cnn,mlp]": f"model=[cnn,mlp]: model {ONE_CHOICE}",
    "train +model=cnn": "model: is chosen already; write model=… without the plus",
    "train +callbacks.own={_target_:mine.Own,size:inf}": "callbacks.own.size: got inf, takes finite numbers",
    "train +callbacks.own={_target_:mine.Own,names:{5:five}}": "callbacks.own.names: got '5', which cannot be the name of an option",
    "train +callbacks.own={_target_:mine.Own,size:18446744073709551616}": "callbacks.own.size: holds a value that no option has, of type int",
    "train callbacks=early_stopping callbacks.early_stopping.patienc=3": "callbacks.early_stopping.patienc: no such option. Did you mean 'patience'?",
    "train experiment=find_batch_size data.batch_size=64": "data.batch_size: experiment=find_batch_size finds it; search.start=8 is",
    "train experiment=diagnose hydra.run.dir=mine": OF_SWEEP,
    "train -m seed=0,1 hydra.run.dir=mine": OF_SWEEP,
    "train experiment=find_batch_size compile=reduce-overhead trainer.accumulate_grad_batches=4": "compile: reduce-overhead uses CUDA graphs",
    "train +callbacks.own={_target_:mine.Own,size:[[inf]]}": "callbacks.own.size.0.0: got inf, takes finite numbers",
    "train --cfg job data.batch_sise=512": "data.batch_sise: no such option. Did you mean 'batch_size'?",
    "train --cfg job resume=there": "--cfg: the configuration of a run that is resumed is in its run.json",
    "train experiment=foo": "experiment: got 'foo', takes … quickstart",
    "train hydra/launcher=joblib": "hydra/launcher: joblib is not installed; pip install 'batchscope[joblib]'",
    "train -m hydra/launcher=submitit_slurm seed=0,1": "hydra/launcher: hydra_submitit_launcher is not installed; pip install 'batchscope[slurm]'",
    "train -m hydra/launcher=ray seed=0,1": "hydra/launcher: hydra_ray_launcher is not installed; pip install 'batchscope[ray]'",
    "train hydra/sweeper=optuna": "hydra/sweeper: optuna is not installed; pip install 'batchscope[optuna]'",
    "train hydra/launcher=joblab": "hydra/launcher: got 'joblab', takes basic",
    "train --config-dir nowhere": "--config-dir: got 'nowhere', which is not a folder",
    "train --config-dir conf/model": "--config-dir: 'conf/model' holds no YAML file of a config group, such as conf/model/model/….yaml",
    "train --config-dir clash": "--config-dir: clash/model/cnn.yaml has the name of an installed config; rename it",
    **{f"{command} --config-dir nowhere{rest}": "--config-dir: got 'nowhere', which is not a folder" for command, rest in EVERYWHERE.items()},
    # a value
    "train data.batch_size=0": "data.batch_size: got 0, takes a whole number of at least 1",
    "train data.batch_size=2.5": "data.batch_size: got 2.5",
    "train data.batch_size=": "data.batch_size: got nothing",
    "latency model=cnn data=mnist compile=true": "compile: has no effect on a network that was not trained and does not train",
    "latency model=cnn data=mnist init=a.pt": "init: has no effect on a network that was not trained and does not train",
    "latency model=cnn data=mnist optimizer.lr=1": "optimizer.lr: has no effect on an evaluation, which reads no optimizer",
    "latency model=cnn data.batch_size=0": "data.batch_size: takes a whole number from 1 to 1,048,576, got '0'",
    "latency model=cnn ++data.batch_size=0": "data.batch_size: takes a whole number from 1 to 1,048,576, got '0'",
    "train data.batch_size=???": "data.batch_size: has no value; write data.batch_size=…",
    "train -m data.batch_size=64,0": "data.batch_size: got 0",
    "train +data.batch_size=3": "data.batch_size: Could not append to config. … Either remove + prefix: 'data.batch_size=3'",
    "train ~data.batch_size": "data.batch_size: is missing",
    "train ~trainer.limit_val_batches": "trainer.limit_val_batches: Could not delete from config.",
    "train data.pipeline=memry": "data.pipeline: got 'memry', takes memory or device or workers. Did you mean 'memory'?",
    **{f"train optimizer.lr={rate}": f"optimizer.lr: got {rate}, takes a number above 0" for rate in ("-1", "nan", "inf")},
    "train optimizer.lr=0,001": "optimizer.lr: got several values, takes one; write one command for each value, or batchscope train -m … for a sweep; a decimal number has a point: 0.001",
    "train seed=0,1": "seed: got several values, takes one; … batchscope train -m … for a sweep",
    "train optimizer.lr_scaling=lineal": "optimizer.lr_scaling: got 'lineal', takes auto, none, sqrt, linear. Did you mean 'linear'?",
    "train optimizer.reference_batch=64": "optimizer.reference_batch: no such option. Did you mean 'reference_batch_size'?",
    "train search={start:0}": "search.start: got 0, takes a whole number of at least 1",
    "train experiment=time_to_target target=0.9 search.sizes=[0]": "search.sizes: got [0], takes a list, each item",
    "train compile=fast": "compile: got 'fast', takes true or false or default, reduce-overhead",
    "train seed=99999999999": "seed: got 99999999999, takes a whole number from 0 to 4,294,967,295",
    "train seed=1,2": f"seed: {RUN_EACH}, or batchscope train -m … for a sweep",
    "train experiment=find_batch_size model=cnn,mlp": f"model: {RUN_EACH}\n",
    "train experiment=find_lr": "optimizer.lr: has several values in a config; write batchscope train -m …",
    "train -m seed=0,1 optimizer.lr=interval(1e-4,1e-1)": "optimizer.lr=interval(1e-4,1e-1): an interval is for a sweeper that searches; add hydra/sweeper=optuna",
    "train trainer.max_epochs=-3": "trainer.max_epochs: got -3, takes a whole number of at least -1 or null.",
    "train trainer.max_steps=-2": "trainer.max_steps: got -2, takes a whole number of at least -1.",
    "train trainer.limit_train_batches=1.5": "trainer.limit_train_batches: got 1.5, takes a whole number of at least 0 or a number from 0 to 1",
    "train trainer.val_check_interval=0": "trainer.val_check_interval: got 0, takes a whole number of at least 1 or a number above 0",
    "train +trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch: got 0, takes a whole number of at least 1",
    "train trainer.gradient_clip_val=-1": "trainer.gradient_clip_val: got -1, takes a number of at least 0 or null.",
    "train trainer.precision=bf16-mixt": "trainer.precision: got 'bf16-mixt', … Did you mean 'bf16-mixed'?",
    "train trainer.accumulate_grad_batches=0": "trainer.accumulate_grad_batches: got 0, takes a whole number of at least 1.",
    "train trainer.num_sanity_val_steps=-2": "trainer.num_sanity_val_steps: got -2, takes a whole number of at least -1",
    "train trainer.fast_dev_run=-1": "trainer.fast_dev_run: got -1, takes true or false or a whole number of at least 0.",
    "train trainer.deterministic=worn": "trainer.deterministic: got 'worn', … Did you mean 'warn'?",
    "train trainer.accelerator=null": "trainer.accelerator: got null, takes a text",
    # a sweep of no run, and of a choice that asks for more
    "train -m model=glob(*)": "model=glob(*): takes names, such as model=a,b, and no glob",
    "train -m seed=range(5,5)": "seed=range(5,5): has no value, so there is no run",
    "train -m seed=shuffle(0,1)": "seed=shuffle(0,1): draws another order each time, so that no sweep could go on; write",
    "train -m experiment=throughput,time_to_target": "target: has no value; write target=…, which experiment=time_to_target needs",
    # what no run reads
    "train optimizer.factor=0.5": "optimizer.factor: has no effect with optimizer.schedule=one_cycle, only with step",
    "train optimizer.schedule=constant optimizer={warmup:0.1}": "optimizer.warmup: has no effect with optimizer.schedule=constant, only with",
    "train optimizer.reference_batch_size=64": "optimizer.reference_batch_size: has no effect with optimizer.lr_scaling=none, only with auto",
    "train -m optimizer.schedule=step,cosine optimizer.min_lr=0,1e-4": "optimizer.min_lr: has no effect with optimizer.schedule=step, only",
    "train ~optimizer.schedule optimizer.factor=0.5": "optimizer.factor: has no effect with optimizer.schedule=constant, only with step",
    "train data.num_workers=4": "data.num_workers: has no effect with data.pipeline=memory, only with workers",
    "train timing=true": "timing: has no effect on a single run; write batchscope train -m …",
    "train optimized_metric=val/acc": ONLY_SEARCHED,
    "train -m seed=0,1 optimized_metric=val/acc": ONLY_SEARCHED,
    "train experiment=find_batch_size optimized_metric=val/acc": ONLY_SEARCHED,
    # what does not go together
    "train model=cnn data=adding": "model: SimpleCNN reads image data, and Adding serves sequence data; write another model=… or data=…",
    "train callbacks=null callbacks.throughput.calibrate=false": "callbacks.throughput.calibrate: no such option. callbacks.throughput is left out here.",
    "train callbacks.early_stopping.patience=5": "callbacks.early_stopping.patience: write callbacks=early_stopping beside it",
    "train +callbacks.early_stopping.patience=5": "callbacks.early_stopping: write callbacks=early_stopping beside it",
    "train callbacks.early_stopping=true": "callbacks.early_stopping: write callbacks=early_stopping in its place",
    "train logger.wandb=true": "logger.wandb: write logger=wandb in its place",
    "train callbacks.wait_until_quiet.minutes=3": "callbacks.wait_until_quiet.minutes: write callbacks=wait_until_quiet beside it",
    "train logger.csv=false": "logger.csv: got False, takes null or a node with a _target_",
    "train logger.wandb.project=x": "logger.wandb.project: write logger=wandb beside it",
    f"train {SEARCHER}": "callbacks.bsf: … experiment=find_batch_size",
    "train +callbacks.more._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler": "callbacks.more: … write trainer.accumulate_grad_batches=…",
    "train +callbacks.more._target_=lightning.pytorch.callbacks.StochasticWeightAveraging": "callbacks.more: … write callbacks=weight_averaging",
    "train +trainer.default_root_dir=x": "trainer.default_root_dir: takes null; hydra.run.dir=… moves the whole run",
    "train compile=reduce-overhead trainer.accumulate_grad_batches=2": "compile: reduce-overhead uses CUDA graphs",
    "train search={_target_:batchscope.sweep.time_to_target.TimeToTarget}": "target: needs a value of target_metric",
    **{f"train -m experiment={name}": "search: finds its runs by itself; write one command for each value, batchscope train … without -m" for name in ("find_batch_size", "diagnose data.batch_size=8,16")},
    "train trainer=ddp trainer.accelerator=cpu trainer.num_nodes=2": "trainer.num_nodes: got 2, and nothing has started this on 2 machines",
    **{f"train experiment=time_to_target {words}": message for words, message in TARGETS.items()},
    "train target=0.9": "target: is an option of experiment=time_to_target; write both",
    # of Hydra
    "train hydra/job_logging=default": "hydra.job_logging, hydra.verbose: …; leave them out",
    "train hydra.searchpath=[file:///there]": "hydra.searchpath: write --config-dir=<folder> in its place",
    "train +hydra.job.env_set.A=${oc.env:NOWHERE}": "hydra.job.env_set.A: …Environment variable 'NOWHERE' not found",
    "train -m seed=0,1 hydra.launcher._target_=${oc.env:NOWHERE}": "hydra.launcher._target_: …Environment variable 'NOWHERE' not found",
    "train tags=[${hydra:runtime.cwd}]": "tags.0: got '${hydra:runtime.cwd}', which is known to Hydra alone; write the value itself",
    "train own@model.part=a": "Override own@model.part=a looks like a config group override, but config group 'own' does not exist.",
    "choose model=cnn +hydra.job.env_set.A=1": "hydra.job.env_set.A: is for batchscope train; set variables in the environment",
    **{f"{command} model=cnn hydra.run.dir=x": "hydra.run.dir: is for batchscope train alone" for command in ("choose", "explain", "latency")},
    # folders
    "train hydra.run.dir=../x": "hydra.run.dir: got '../x', … a folder below this one, or an absolute path",
    "train data.root=../../x hydra.run.dir=outputs/${data.root}": "hydra.run.dir: got 'outputs/../../x'",
    "train hydra.run.dir=null": "hydra.run.dir: got null, takes a value",
    "predict ckpt=file input=nowhere output=file": "input: got 'nowhere', takes test, val, predict, a folder of images, an image or an .npz file",
    f"train hydra.run.dir={TOO_LONG}": f"hydra.run.dir: … {'Windows takes 149' if SYSTEM == 'windows' else 'File name too long'}",
    "train hydra.run.dir=file": "hydra.run.dir: 'file' cannot be written: File exists",
    "train -m seed=0,1 hydra.sweep.dir=file/x": "hydra.sweep.dir: file/x cannot be written: Not a directory",
    f"train init={TOO_LONG}": "init: holds a value that no option has, of type str, with control characters or more than 4,096",
    "train hydra.run.dir=sweep/0": "hydra.run.dir: sweep/0 already holds a run; choose another",
    "train -m hydra.sweep.dir=sweep data.batch_size=4,8": "hydra.sweep.dir: sweep/0 holds a run of another sweep",
    "train -m hydra.sweep.dir=outputs/last seed=0,1": "hydra.sweep.dir: got 'outputs/last', and 'last' stands for the newest",
    "train hydra.run.dir=last": "hydra.run.dir: got 'last', and 'last' stands for the newest folder; choose another name",
    "train -m hydra.sweep.dir=a seed=0,1": "hydra.sweep.dir: a holds a single run; choose another folder",
    "train -m hydra.sweep.dir=../x": "hydra.sweep.dir: got '../x'",
    "train run_dir=mine": "run_dir: is set by the run; write hydra.run.dir=mine to choose its folder",
    # which run is resumed
    "train resume=x -m": "resume: takes a single run; a sweep is resumed by its own command",
    "train resume=nowhere": "resume: got 'nowhere', which does not exist; it takes a run's folder, or 'last'",
    "train resume=last": "resume: got 'last', and there is no run in outputs/runs",
    "train resume=": "resume: takes the folder of one run, or 'last'",
    "train resume=sweep": "resume: got 'sweep', which is not the folder of a run (no run.json in it); a sweep is resumed by its own command and",
    # the other commands
    "evaluate": "ckpt: is missing; write ckpt=outputs/runs/<run>/checkpoints/best.ckpt",
    "evaluate ckpt=": "ckpt: takes a value",
    "evaluate cpkt=x": "cpkt: no such option. Did you mean 'ckpt'?",
    "evaluate ckpt=last": "ckpt: got 'last', and there is no run in outputs/runs",
    "evaluate ckpt=sweep/0": "ckpt: got 'sweep/0', which is not a file; write ckpt=sweep/0/checkpoints/last.ckpt",
    "evaluate sweep/0": "sweep/0: takes option=value; write ckpt=sweep/0",
    "evaluate cofn": "cofn: takes option=value",
    "evaluate ckpt=file conf": "conf: takes option=value\n",
    "predict ckpt=file conf": "conf: takes option=value; write input=conf",
    "predict conf ckpt=file": "conf: takes option=value; write input=conf",
    "latency file": "file: takes option=value; write ckpt=file",
    "evaluate ~task.metrics.acc": "ckpt: is missing; write ckpt=",
    "explain nowhere": "explain: got 'nowhere', which does not exist; it takes a run's folder",
    "explain conf": "explain: got 'conf', which is not the folder of a run (no run.json in it)",
    "explain a --out sweep": "--out: 'sweep' exists; give another name",
    "explain data.batch_size=1,2": "data.batch_size: got several values",
    "compare a nowhere": "nowhere: no such folder",
    "compare a b --rerun --out sweep": "--out: 'sweep' exists; give another name",
    "report nowhere": "nowhere: no such folder",
    "choose nowhere": "nowhere: no such folder",
    "choose sweep/0": "choose: sweep/0: one batch size, 8, and choose needs two at least",
    "choose sweep --devices h10": "--devices: got 'h10', which is no known card. Did you mean 'h100'?",
    "choose sweep --price h10=2": "--price: got 'h10', which is no known card. Did you mean 'h100'?",
    "choose sweep --price cpu-2=2": "--price: got 'cpu-2', which is no known card.",
    "choose sweep --price h100=2/h": "--price: got 'h100=2/h', takes what an hour of a device costs",
    "choose sweep --price h100=2 --price h100=3": "--price: got 'h100=3', and h100 has a price already",
    "choose sweep --price t4=1 --price mps=1": "--price: got mps=1, the price of no device that is compared; takes those of cpu, t4, l4",
    "choose sweep --devices t4 --price a100=1": "--price: got a100=1, the price of no device that is compared; takes those of cpu, t4",
    "choose model=cnn trainer.accelerator=cpu --price mps=1": "--price: got mps=1, the price of no device that is compared; takes those of cpu, t4, l4",
    "choose model=cnn trainer.accelerator=cpu --devices t4 --price h100=2": "--price: got h100=2, the price of no device that is compared; takes those of cpu, t4",
    "choose model=cnn trainer.accelerator=cpu --batch-size 9": "--batch-size: got 9; the training is to be measured at 8, 32, 128, 512",
    "choose model=cnn trainer.accelerator=cpu data.batch_size=8,64 --batch-size 9": "--batch-size: got 9; the training is to be measured at 8, 64",
    "choose model=cnn trainer.accelerator=cpu trainer.precision=bf16-mixed --precision 16-mixed": "--precision: the training is to be measured in bf16-mixed",
    "choose model=cnn trainer.accelerator=cpu trainer.precision=bf16 --precision tf32": "--precision: the training is to be measured in bf16-mixed",
    "choose model=cnn trainer.accelerator=cpu trainer.precision=16 --precision 16-mixed": "--precision: the training is to be measured in bf16-mixed",
    "choose sweep --batch-size 9": "--batch-size: got 9; cnn · mnist was measured at 8, 64, 512",
    "choose modle=cnn": "modle: no such option. Did you mean 'model'?",
    **{f"choose model=cnn data.batch_size={sizes}": "data.batch_size: choose needs several sizes" for sizes in ("64", "64,64")},
    "choose model=cnn ++data.batch_size=64,64": "data.batch_size: choose needs several sizes",
    **{f"choose model=cnn data.batch_size={sizes}": "data.batch_size" for sizes in ("64,0", "64,x", "null", "interval(1,64)")},
    "choose model=cnn,mlp": f"model: {RUN_EACH}\n",
    "choose model=cnn compile=true": "compile: choose predicts by the operations of a step, and a compiled step does not show them",
    "choose model=cnn trainer.max_steps=1000": "trainer.max_steps: choose measures until a step's time is known, and takes whole epochs; write --epochs",
    "choose --config-dir conf experiment=steps": "trainer.max_steps: choose measures until a step's time is known, and takes whole epochs; write --epochs",
    **{f"choose model=cnn trainer.devices=2 {options}": "trainer.devices: choose compares single devices" for options in ("trainer.max_steps=1000 --epochs 3", "trainer.max_steps=-1 trainer.max_time=null")},
    "choose model=cnn trainer.devices=2": "trainer.devices: choose compares single devices",
    "choose model=cnn trainer.devices=[0,1]": "trainer.devices: choose compares single devices",
    **{f"new {name}": f"new: got '{name.strip('␣')}', takes a name for a Python package: small letters" for name in ("my-net", "Mynet", "../net", "␣", "class")},
    **{f"new {name}": f"new: got '{name}', which is the name of another module" for name in ("torch", "json", "conf")},
    **{f"new {name}": f"new: got '{name}', which is no text in an option" for name in ("null", "true", "nan")},
    "new \udcff": r"new: got '\udcff', takes a name for a Python package",  # a byte that is no text
    "new cnn": "new: got 'cnn', which is the name of a choice of batchscope",
    "new taken": "new: taken is there already; choose another name, or another folder to work in",
    "run nowhere.py": "run: got 'nowhere.py', which is not a file",
}  # fmt: skip
SYNTAX = "…cannot be parsed: write option=value without spaces around the =; a value with a comma"
# exit code 2
UNPARSED = {
    "trani": "trani: no such command. Did you mean 'train'? batchscope takes train, new, evaluate, run, predict",
    "--model cnn": "--model: no such command. batchscope takes train",
    "model=cnn": "model=cnn: an option comes after a command; write batchscope train model=cnn",
    "train --nope": "--nope: no such flag.",
    "train --verbos": "--verbos: no such flag. Did you mean '--verbose'?",
    "train --eval": "--eval: no such flag.\n",
    "train --lr=0.1": "--lr=0.1: no such flag. Options are written without dashes: optimizer.lr=0.1",
    "train --model cnn": "--model: no such flag. Options are written without dashes: model=<value>",
    "train --data.batch_size=64": "--data.batch_size=64: … Options are written without dashes: data.batch_size=64",
    "train --batch_size 512": "--batch_size: no such flag. Options are written without dashes: data.batch_size=<value>",
    "train --min_epochs=2": "--min_epochs=2: no such flag. Options are written without dashes: trainer.min_epochs=2",
    "train --epochs=3": "--epochs=3: no such flag. epochs: write trainer.max_epochs=3",
    "train --gpus=2": "--gpus=2: no such flag. gpus: write trainer.accelerator=gpu trainer.devices=2",
    "train cnn": "cnn: cannot be parsed: options are written as option=value; did you mean 'model=cnn'?",
    "train data.batch_size␣=␣8": SYNTAX,
    "train -m data.batch_size=16,": SYNTAX,
    "train data.batch_size=,16": SYNTAX,
    "train data.batch_size=[1": SYNTAX,
    "train tags=[größe]": SYNTAX,
    "train data.root=~/data": "data.root=~/data: cannot be parsed: a shell replaces ~ at the beginning of a word alone",
    "train =3": "…cannot be parsed",
    "train --cfg": "argument --cfg: expected one argument",
    "train --cfg foo": "argument --cfg: invalid choice: 'foo' (choose from 'job')",
    "train --cfg job --multirun": "--multirun and --cfg: only one of them at a time",
    "evaluate --nope": "unrecognized arguments: --nope",
    "explain a b": "explain: takes one run; got a and b",
    "report sweep sweep": "--out: is missing; a report on several folders needs a folder of its own",
    "run": "the following arguments are required: script; batchscope run --help says what it takes",
    "report x --ou=y": "unrecognized arguments: --ou=y. Did you mean '--out'?",
    "compare a": "the following arguments are required: B; batchscope compare --help says what it takes",
    "compare a b data.batch_size=8": "compare: takes two folders; got 'data.batch_size=8', and options are for --rerun",
    "compare a b --rerun --passes 4": "argument --passes: takes a whole number from 5",
    **{f"compare a b {flag} 7": f"{flag}: is for --rerun, which runs both again" for flag in ("--passes", "--python-b", "--out")},
    **{f"compare a b --max-slowdown={share}": "argument --max-slowdown: takes a share such as 5% or 0.05" for share in ("5", "-5%", "nan")},
    "choose": "choose: takes the folder of a sweep, or options such as model=cnn data=mnist",
    "choose sweep model=cnn": "choose: takes folders or options; got sweep and model=cnn",
    "choose sweep --epochs 1.5": "argument --epochs: takes a whole number from 1 to 100,000,000, got '1.5'",
    "choose sweep --start-up 5min": "argument --start-up: takes a number from 0 to 1,000,000, got '5min'",
    "hardware --device cdua": "argument --device: invalid choice: 'cdua' (choose from",
    "choose sweep --precision 8-bit": "argument --precision: invalid choice: '8-bit'",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A file, two runs, a sweep with a checkpoint, two folders of configs, and a name that is taken."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("a", "b"):
        write_run(folder / name, 64, 10.0)
    write_training(folder / "sweep")
    for name in ("file", "conf/model/mine.yaml", "clash/model/cnn.yaml", "sweep/0/checkpoints/last.ckpt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "conf/experiment").mkdir()
    (folder / "conf/experiment/steps.yaml").write_text("# @package _global_\ntrainer: {max_steps: 1000}\n")
    (folder / "taken").symlink_to("nowhere")
    return folder


ROWS = [(line, 1, text) for line, text in REFUSED.items()] + [(line, 2, text) for line, text in UNPARSED.items()]


@pytest.mark.parametrize(("line", "code", "message"), ROWS, ids=[row[0][:100] for row in ROWS])
def test_a_mistake_is_one_line_with_its_exit_code_and_nothing_is_written(line, code, message, world, monkeypatch):
    module = ModuleType("a line that is taken trains nothing")
    module.train = module.run_sweep = lambda *_: pytest.fail("the line is taken")
    monkeypatch.setitem(sys.modules, "batchscope.training.run", module)
    monkeypatch.chdir(world)
    before = contents(world)
    result = answer(*("" if word == "␣" else word.replace("␣", " ") for word in line.split()))
    pattern = ".*".join(re.escape(part.strip(" ")) for part in message.split("…"))
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1), result
    assert re.match(pattern, result.err.removeprefix("error: ")), result.err
    assert contents(world) == before
