// What the noise level alone decides.
import { chart } from "../charts.js";
import { make, toggles } from "../page.js";
import { look } from "./look.js";
import { norm, stepOf } from "./parts.js";

export default {
  box: "modulation",
  says: "The noise level t alone decides how strongly each part of a block is shifted, scaled and let through: the " +
    "mean size of these vectors, from pure noise (1) to the picture (0). The red line is this step.",
  chapter: ["05_transformer", 5],
  steps: true,
  controls: () => [
    toggles(
      "stream",
      [
        ["picture, double blocks", "img"],
        ["text, double blocks", "txt"],
        ["single blocks", "single"],
      ],
      look.now.stream,
      (v) => look.set({ stream: v }),
    ),
  ],
  together: true,
  show: (run = look.runs[0]) => {
    const { modulation, d } = run.read,
      count = modulation[0][1][look.now.stream].length / d,
      parts = ["shift", "scale", "gate"];
    const series = (first) =>
      Object.fromEntries(
        parts.map((name, k) => [
          name,
          modulation.map(([t, vectors]) => {
            const v = vectors[look.now.stream].subarray((first + k) * d, (first + k + 1) * d);
            return [t, norm(v) / Math.sqrt(d)];
          }),
        ]),
      );
    return [
      make(
        "div.row",
        {},
        ...(count > 3
          ? [
            ["attention", 0],
            ["MLP", 3],
          ]
          : [["attention and MLP", 0]]).map(([title, first]) =>
            chart({
              title,
              x: "noise level t",
              y: "root mean square",
              series: series(first),
              mark: stepOf(run).t,
              xlim: [0, 1],
              floor: 0,
            })
          ),
      ),
    ];
  },
};
