// The walk from noise to the picture, and where a step leads.
import { chart, overlay } from "../charts.js";
import { figure, make } from "../page.js";
import { dot, minus, norm, pictureOf, stepOf } from "./parts.js";

export default {
  box: "velocity",
  says: "The answer of the transformer is a direction. From where the walk stands, the arrow leads to the picture " +
    "expected there; a step goes part of the way, and asks again.",
  chapter: ["04_sampling", 4],
  steps: true,
  show: (run) => {
    const {
        read: { start, gh, gw, channels },
        steps,
      } = run,
      end = steps.at(-1).latents,
      away = minus(start, end),
      far = norm(away),
      u = away.map((v) => v / far);
    const side = minus(steps[0].clean, end),
      along = dot(side, u),
      across = side.map((v, i) => v - along * u[i]),
      wide = norm(across) || 1,
      w = across.map((v) => v / wide);
    const flat = (x) => {
        const from = minus(x, end);
        return [dot(from, u), dot(from, w)];
      },
      walk = [start, ...steps.map((step) => step.latents)].map(flat),
      goals = steps.map((step) => flat(step.clean)),
      step = stepOf(run);
    const sizes = Float32Array.from(
      { length: gh * gw },
      (_, i) => norm(step.velocity.subarray(i * channels, (i + 1) * channels)),
    );
    return [
      make(
        "div.row.maps",
        {},
        chart({
          title: "The walk, seen from the side",
          x: "towards the noise",
          y: "across",
          series: { walk, expected: goals },
          dots: ["expected"],
          arrows: [[...walk[step.index], ...goals[step.index]]],
        }),
        figure(
          overlay(
            make("canvas", { role: "img", "aria-label": "Length of the velocity in each patch" }),
            pictureOf(run, step),
            sizes,
            gh,
            gw,
          ),
          `length of the velocity, up to ${Math.max(...sizes).toFixed(1)}`,
        ),
      ),
    ];
  },
};
