"""The recorded FLOPs of the zoo's training steps beside the closed forms that the tests compare them with.

python benchmarks/flops.py
"""

import sys
from pathlib import Path

from harness import write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.closed_forms import ZOO, zoo_task
from tests.support.recorded import count_step


def main() -> None:
    lines = ["| model | input | forward: counted | on paper | backward: counted | on paper | step ÷ forward |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    data = {}
    for (name, spec), (forward, backward) in ZOO.items():
        counted = count_step(*zoo_task(name, spec))
        shape = "×".join(map(str, spec.input_shape))
        numbers = (counted.forward, forward, counted.backward, backward)
        shown = " | ".join(f"{number:,.0f}" for number in numbers)
        lines.append(f"| {name} | {shape} | {shown} | {counted.total / counted.forward:.2f} |")
        data[f"{name} {shape}"] = {"counted": [counted.forward, counted.backward], "on_paper": [forward, backward]}
    write_result("flops", "\n".join(lines), {"flops_per_sample": data})


if __name__ == "__main__":
    main()
