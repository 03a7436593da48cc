"""`benchmarks/choose.py`: reads folders of measurements, predicts devices that it has not seen, and refuses damaged rows."""

import csv
import importlib.util
import io
import json
import math
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "choose.py"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "gpu_kernels"
sys.path.insert(0, str(BENCHMARKS))

import choose as script
from device_choice.fit import Fit, tables
from device_choice.measurements import read

from batchscope.choice.kernels import FILE, middles
from batchscope.errors import exit_on_user_error

DEVICES = "device,memory_gb,bandwidth_gb_s,sms,cores_per_sm,mhz,fp32_gflop_s,l2_mb,tdp_w\n"
KERNELS = "op,B,M,N,K,H,device,ms\n"
CARDS = {
    "one": "16,700,56,64,1400,9500,4,250",
    "two": "24,300,58,128,2000,31000,48,72",
    "three": "40,1500,108,64,1400,19500,40,250",
}


def folder(path: Path, names: tuple[str, ...] = tuple(CARDS), more: str = "") -> Path:
    """Operations at half of the roof on each device."""
    path.mkdir()
    (path / "devices.csv").write_text(DEVICES + "".join(f"{name},{CARDS[name]}\n" for name in names))
    lines = []
    for name in names:
        bandwidth, flops = float(CARDS[name].split(",")[1]) * 1e9, float(CARDS[name].split(",")[5]) * 1e9
        for size in range(1024, 4096, 128):
            lines.append(f"add,{size},,,,1024,{name},{2e3 * 12 * size * 1024 / bandwidth}")
            lines.append(f"ln,{size},,,,1024,{name},{2e3 * 8 * size * 1024 / bandwidth}")
            lines.append(f"linear,,{size},1024,4096,,{name},{2e3 * 2 * size * 1024 * 4096 / flops}")
    (path / "kernels.csv").write_text(KERNELS + "".join(f"{line}\n" for line in lines) + more)
    return path


def choose(*words: object) -> subprocess.CompletedProcess[str]:
    """What the script does in this process, as `python benchmarks/choose.py …` does in its own."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        try:
            exit_on_user_error(script.main)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def found(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    assert all(len(line) <= 100 for line in result.stdout.splitlines()[:-1])
    return json.loads(result.stdout.splitlines()[-1])


def refused(result: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    assert result.returncode == code
    assert len(result.stderr.splitlines()) == 1
    assert all(word in result.stderr for word in words), result.stderr
    assert not result.stdout


def test_each_device_is_predicted_from_the_others(tmp_path: Path) -> None:
    result = found(choose("--fit", folder(tmp_path / "a")))
    assert result["mode"] == "leave one out"
    assert set(result["by_kind"]) == {"linear", "layer_norm", "elementwise"}
    assert set(result["by_kind_and_device"]["linear"]) == set(CARDS)
    assert result["overall"]["cases"] == 3 * 3 * 24
    assert 0 <= result["overall"]["coverage"] <= 100
    assert result["ranking"]["pairs"] > 0


def test_a_second_run_prints_the_same_numbers(tmp_path: Path) -> None:
    first, second = (found(choose("--fit", folder(tmp_path / name))) for name in "ab")
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_devices_of_another_folder_are_predicted_also_where_columns_are_missing(tmp_path: Path) -> None:
    fitted, tested = folder(tmp_path / "a", ("one", "two")), folder(tmp_path / "b", ("three",))
    (tested / "devices.csv").write_text("device,bandwidth_gb_s,fp32_gflop_s,tdp_w\nthree,1500,19500,\n")
    result = found(choose("--fit", fitted, "--test", tested))
    assert result["mode"] == "test"
    assert result["tested"] == ["three"]
    assert set(result["ranking"]["by_device_pair"]) == {"one | three", "three | two"}


def test_a_tested_device_that_was_fitted_is_named(tmp_path: Path) -> None:
    result = choose("--fit", folder(tmp_path / "a"), "--test", folder(tmp_path / "b", ("one",)))
    assert found(result)["in_both"] == ["one"]
    assert "fitted and tested" in result.stderr


def test_one_device_can_be_fitted_but_not_left_out(tmp_path: Path) -> None:
    fitted = folder(tmp_path / "a", ("one",))
    refused(choose("--fit", fitted), "one device")
    found(choose("--fit", fitted, "--test", folder(tmp_path / "b", ("two",))))


def test_unknown_operations_are_left_out_with_a_line(tmp_path: Path) -> None:
    result = choose("--fit", folder(tmp_path / "a", more="fold,1024,,,,1024,one,1.0\n"))
    assert found(result)["overall"]["cases"] == 3 * 3 * 24
    assert "fold (1 rows)" in result.stderr


def test_other_precisions_are_left_out_with_a_line(tmp_path: Path) -> None:
    measured = folder(tmp_path / "a")
    lines = (measured / "kernels.csv").read_text().splitlines()
    more = ["add,1024,,,,1024,one,1.0,float16", "linear,,8,8,8,,one,1.0,bf16"]
    text = [f"{lines[0]},dtype", *(f"{line},torch.float32" for line in lines[1:]), *more]
    (measured / "kernels.csv").write_text("\n".join(text))
    result = choose("--fit", measured)
    assert found(result)["overall"]["cases"] == 3 * 3 * 24
    assert "add in float16 (1 rows), linear in bf16 (1 rows)" in result.stderr


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("add,1024,,,,1024,one,0", ["ms is '0'", "positive number"]),
        ("add,1024,,,,1024,one,-1", ["ms is '-1'"]),
        ("add,1024,,,,1024,one,nan", ["ms is 'nan'"]),
        ("add,1024,,,,1024,one,inf", ["ms is 'inf'"]),
        ("add,1024,,,,1024,one,soon", ["ms is 'soon'"]),
        ("add,1024,,,,,one,1.0", ["H is ''"]),
        ("linear,,10.5,10,10,,one,1.0", ["M is '10.5'", "whole number"]),
        ("add,1e300,,,,1024,one,1.0", ["B is '1e300'", "at most"]),
        ("add,1024,,,,1024,four,1.0", ["'four' is not in", "devices.csv"]),
        ("add,1024,,,,1024", ["fewer values"]),
        ("add,1024,,,,1024,one,1.0,2.0", ["more values"]),
        (",1024,,,,1024,one,1.0", ["op is empty"]),
    ],
)
def test_a_damaged_row_is_one_line_with_its_number(tmp_path: Path, row: str, words: list[str]) -> None:
    damaged = folder(tmp_path / "a", more=f"{row}\n")
    refused(choose("--fit", damaged), f"kernels.csv:{2 + 3 * 3 * 24}:", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device,bandwidth_gb_s\none,700\n", ["devices.csv:1", "fp32_gflop_s"]),
        (DEVICES + "one,16,0,56,64,1400,9500,4,250\n", ["devices.csv:2", "bandwidth_gb_s is '0'"]),
        (DEVICES + "one,16,700,many,64,1400,9500,4,250\n", ["devices.csv:2", "sms is 'many'"]),
        ("device,bandwidth_gb_s,fp32_gflop_s,kind\none,1500,19500,rocm\n", ["devices.csv:2", "kind is 'rocm'"]),
        (DEVICES + 2 * "one,16,700,56,64,1400,9500,4,250\n", ["devices.csv:3", "twice"]),
        ("", ["devices.csv:1"]),
    ],
)
def test_a_damaged_device_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    damaged = folder(tmp_path / "a")
    (damaged / "devices.csv").write_text(text)
    refused(choose("--fit", damaged), *words)


def test_a_folder_without_measurements_is_one_line(tmp_path: Path) -> None:
    refused(choose("--fit", tmp_path / "nowhere"), "is no folder")
    refused(choose("--fit", tmp_path), "devices.csv", "cannot be read")
    empty = folder(tmp_path / "a")
    (empty / "kernels.csv").write_text(KERNELS)
    refused(choose("--fit", empty), "has no measurement")
    refused(choose("--fit", folder(tmp_path / "b"), "--test", empty), "has no measurement")
    refused(choose("--fits", empty), code=2)
    (empty / "kernels.csv").write_bytes(b"op,device,ms\n\xff\xfe,one,1\n")
    refused(choose("--fit", empty), "UTF-8")


def test_the_fit_and_the_package_predict_the_same(tmp_path: Path) -> None:
    measurements = read(folder(tmp_path / "a"))
    of = Fit(measurements).coefficients(measurements.measured_devices())
    for family, table in tables(measurements.rows).items():
        rows = [row for row in measurements.rows if (row[0].kind == "linear") == (family == "products")]
        for (work, device, _), one in zip(rows, table.predicted(getattr(of, family)), strict=True):
            assert math.log(middles([work], device, of)[0]) == pytest.approx(one, rel=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs the shared measurements in {SHARED}")
def test_the_packages_coefficients_are_what_the_script_makes_of_the_shared_measurements() -> None:
    specification = importlib.util.spec_from_file_location("choose", SCRIPT)
    assert specification and specification.loader
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    made = json.loads(script.as_json(script.fit_all(read(SHARED))))
    stored = json.loads(FILE.read_text())
    assert made["source"] == stored["source"]
    for part in ("products", "memory", "device_spread", "kernel_spread"):
        assert made[part] == pytest.approx(stored[part], rel=0.02)
    assert len(list(csv.reader((SHARED / "devices.csv").open()))) == 1 + 5
