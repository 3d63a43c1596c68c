// The picture that is expected.
import { figure, make, paint } from "../page.js";
import { look } from "./look.js";
import { number, pictureOf, stepOf } from "./parts.js";

export default {
  box: "picture",
  says: "The decoder makes pixels of latents: this is the picture that is expected from the step, and after the " +
    "last one the picture.",
  chapter: ["06_pipeline", 6],
  steps: true,
  show: (run) => [
    figure(
      paint(
        make("canvas.large", { role: "img", "aria-label": `Expected after step ${look.now.step}: ${run.prompt}` }),
        pictureOf(run, stepOf(run)),
      ),
      `noise level ${number(stepOf(run).t)} to ${number(stepOf(run).tNext)}`,
    ),
  ],
};
