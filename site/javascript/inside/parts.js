// Parts that several views of Look inside are made of.
import { viridis } from "../charts.js";
import { make, slider } from "../page.js";
import { look } from "./look.js";

export const number = (value) => value.toFixed(2),
  percent = (share) => `${(100 * share).toFixed(0)} %`;
export const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0),
  norm = (a) => Math.sqrt(dot(a, a));
export const minus = (a, b) => a.map((value, i) => value - b[i]);
export const shown = (text) => text.replace(/\n/g, "↵").replace(/^ /, "␣");
export const pictureOf = (run, step) => ({ rgba: step.rgba, width: 16 * run.read.gw, height: 16 * run.read.gh });
export const stepOf = (run) => run.steps[Math.min(look.now.step, run.steps.length) - 1];

/** A token that can be chosen; its shade is a share from 0 to 1. */
export function chip(token, share, chosen, click) {
  const element = make(
    "button.chip",
    {
      type: "button",
      "aria-pressed": click && String(chosen),
      title: `id ${token.id}`,
      disabled: !click,
      onclick: click,
    },
    shown(token.text),
  );
  if (share !== null) {
    const color = viridis(share),
      light = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 140;
    element.style.background = `rgb(${color})`;
    element.style.color = light ? "#111" : "#fff";
  }
  return element;
}

/** A canvas of patches: a click chooses one. */
export function patches(run, canvas, label) {
  const { gh, gw } = run.read,
    at = look.now.patch % (gh * gw),
    context = canvas.getContext("2d");
  context.strokeStyle = "#fff";
  context.lineWidth = 1.5;
  context.strokeRect((at % gw) * 16 + 1, Math.floor(at / gw) * 16 + 1, 14, 14);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  canvas.classList.add("choose");
  canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect(),
      of = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const row = of((event.clientY - box.top) / box.height, gh),
      column = of((event.clientX - box.left) / box.width, gw);
    look.set({ patch: row * gw + column }, true);
  };
  return canvas;
}

export const blockSlider = (any = true) =>
  slider(
    "block",
    { min: any ? 0 : 1, max: look.runs[0].read.blocks.length, value: Math.max(look.now.block + 1, any ? 0 : 1) },
    (v) => look.set({ block: v - 1 }),
    (v) => (v ? look.runs[0].read.blocks[v - 1] : "mean of all"),
  );

export const headSlider = (key, heads, any = true) =>
  slider(
    "head",
    { min: any ? 0 : 1, max: heads, value: Math.max(look.now[key] + 1, any ? 0 : 1) },
    (v) => look.set({ [key]: v - 1 }),
    (v) => v || "mean of all",
  );

/** The patch, by keyboard. */
export const patchSliders = () => {
  const { gh, gw } = look.runs[0].read,
    at = look.now.patch % (gh * gw),
    to = (row, column) => look.set({ patch: row * gw + column });
  return [
    slider("row", { min: 0, max: gh - 1, value: Math.floor(at / gw) }, (v) => to(v, look.now.patch % gw)),
    slider(
      "column",
      { min: 0, max: gw - 1, value: at % gw },
      (v) => to(Math.floor((look.now.patch % (gh * gw)) / gw), v),
    ),
  ];
};
