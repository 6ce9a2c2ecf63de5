// The page of a training run: values under the pointer, the heat map at a step, and the reload while it trains.
"use strict";
const name = (kind) => document.createElementNS("http://www.w3.org/2000/svg", kind);
const short = (value) => String(Number(value.toPrecision(4)));

for (const chart of document.querySelectorAll("svg[data-scale]")) {
  const [x0, left, xScale, y0, bottom, yScale] = chart.dataset.scale.split(" ").map(Number);
  const curves = [...chart.querySelectorAll("polyline")].filter((line) => line.points.length);
  const pointer = chart.appendChild(name("path"));
  const note = chart.appendChild(name("text"));
  pointer.setAttribute("class", "pointer");
  note.setAttribute("text-anchor", "end");
  note.setAttribute("x", chart.viewBox.baseVal.width - 12);
  note.setAttribute("y", 16);
  chart.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const nearest = (line) => [...line.points].reduce((a, b) => Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a);
    const found = curves.map(nearest);
    if (!found.length) return;
    const step = found.reduce((a, b) => Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a).x;
    const values = found.filter((point) => Math.abs(point.x - step) < 0.1).slice(0, 6);
    pointer.setAttribute("d", `M${step} 28V${bottom}`);
    note.textContent = `step ${Math.round((step - left) / xScale + x0)}: `
      + values.map((point) => short((point.y - bottom) / yScale + y0)).join(", ");
  });
}

const slider = document.getElementById("step");
if (slider) {
  const { steps, frames, colours } = JSON.parse(document.getElementById("frames").textContent);
  const cells = [...document.querySelectorAll("svg.heat rect")];
  const label = document.getElementById("step-label");
  const show = () => {
    const levels = frames[slider.value];
    const open = levels.filter((level) => level >= 50).length;
    label.textContent = `step ${steps[slider.value]}: ${open} of ${levels.length} gates are 0.5 or more`;
    cells.forEach((cell, index) => {
      cell.setAttribute("fill", colours[levels[index]]);
      const title = cell.querySelector("title");
      title.textContent = title.textContent.replace(/: .*/, `: ${(levels[index] / 100).toFixed(2)}`);
    });
  };
  const kept = sessionStorage.getItem("step");  // a step that was chosen stays chosen; the last one follows
  if (kept !== null && steps.includes(Number(kept))) slider.value = steps.indexOf(Number(kept));
  slider.addEventListener("input", () => {
    if (Number(slider.value) === steps.length - 1) sessionStorage.removeItem("step");
    else sessionStorage.setItem("step", steps[slider.value]);
    show();
  });
  show();
}

const seconds = Number(document.getElementById("reload")?.dataset.seconds);
if (seconds) setTimeout(() => location.reload(), 1000 * seconds);
