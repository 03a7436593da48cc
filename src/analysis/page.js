"use strict";
// A click on a point, a bar, a curve or a row picks its runs everywhere; a click on a heading sorts the table.
const picked = new Set();
const marks = [...document.querySelectorAll("[data-runs]")];
const runsOf = (mark) => mark.dataset.runs.split(" ");

function show() {
  document.body.classList.toggle("picking", picked.size > 0);
  for (const mark of marks) {
    const on = runsOf(mark).some((run) => picked.has(run));
    mark.classList.toggle("on", on);
    if (mark.matches("tr")) mark.setAttribute("aria-selected", String(on));
  }
}

function pick(mark, add) {
  const runs = runsOf(mark);
  const again = runs.every((run) => picked.has(run)) && (add || picked.size === runs.length);
  if (!add) picked.clear();
  for (const run of runs) again ? picked.delete(run) : picked.add(run);
  show();
}

document.addEventListener("click", (event) => {
  const mark = event.target.closest("[data-runs]");
  if (mark) pick(mark, event.shiftKey);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { picked.clear(); show(); }
  const row = event.target.closest("tr[data-runs]");
  if (!row) return;
  if (event.key === "Enter" || event.key === " ") pick(row, event.shiftKey);
  else if (event.key === "ArrowDown") row.nextElementSibling?.focus();
  else if (event.key === "ArrowUp") row.previousElementSibling?.focus();
  else return;
  event.preventDefault();
});

const textAt = (row, at) => row.cells[at].textContent;
const numberOf = (text) => (text === "" ? NaN : Number(text.replace(/[, %]/g, "")));
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, at = heading.cellIndex, body = heading.closest("table").tBodies[0];
    const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const order = (one, two) => {
      const [a, b] = [textAt(one, at), textAt(two, at)];
      if (a === "" || b === "") return (a === "") - (b === "");  // what is not known comes last
      const difference = numberOf(a) - numberOf(b);
      return sign * (Number.isNaN(difference) ? a.localeCompare(b) : difference);
    };
    body.append(...[...body.rows].sort(order));
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  });
}
