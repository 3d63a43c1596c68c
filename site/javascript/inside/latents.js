// All channels of the latents, and what one of them paints.
import { heat } from "../charts.js";
import { figure, make, paint, slider } from "../page.js";
import { look } from "./look.js";
import { pictureOf, stepOf } from "./parts.js";

export default {
  box: "latents",
  says: "The picture is made in a small grid of numbers, many channels deep. Each square is one channel of what is " +
    "expected from this step; choose one, push it, and see what it paints.",
  chapter: ["01_autoencoder", 1],
  steps: true,
  controls: () => [
    slider(
      "channel",
      { min: 0, max: look.runs[0].read.channels - 1, value: look.now.channel },
      (v) => look.set({ channel: v }),
    ),
    slider(
      "push",
      { min: -6, max: 6, step: 0.5, value: look.now.push },
      (v) => look.set({ push: v }),
      (v) => v.toFixed(1),
    ),
  ],
  show: (run) => {
    const { gh, gw, channels } = run.read,
      step = stepOf(run),
      columns = 16,
      rows = Math.ceil(channels / columns),
      H = rows * (gh + 1),
      W = columns * (gw + 1),
      sheet = new Float32Array(H * W).fill(-3);
    for (let c = 0; c < channels; c++) {
      for (let i = 0; i < gh * gw; i++) {
        sheet[(Math.floor(c / columns) * (gh + 1) + Math.floor(i / gw)) * W + (c % columns) * (gw + 1) + (i % gw)] =
          step.clean[i * channels + c];
      }
    }
    const canvas = heat(
        make("canvas.sheet.choose", { role: "img", "aria-label": `${channels} channels` }),
        sheet,
        H,
        W,
        { min: -3, max: 3 },
      ),
      context = canvas.getContext("2d");
    context.strokeStyle = "#f33";
    context.strokeRect(
      (look.now.channel % columns) * (gw + 1) - 0.5,
      Math.floor(look.now.channel / columns) * (gh + 1) - 0.5,
      gw + 1,
      gh + 1,
    );
    canvas.onclick = (event) => {
      const box = canvas.getBoundingClientRect(),
        x = Math.floor(((event.clientX - box.left) / box.width) * columns),
        y = Math.floor(((event.clientY - box.top) / box.height) * rows);
      look.set({ channel: Math.min(channels - 1, y * columns + x) }, true);
    };
    const painted = make("canvas", {
        role: "img",
        "aria-label": `Channel ${look.now.channel} pushed by ${look.now.push}`,
      }),
      { turn } = look,
      latents = step.clean.map((value, i) => (i % channels === look.now.channel ? value + look.now.push : value));
    paint(painted, pictureOf(run, step));
    look.painter.ask("decode", { latents, gh, gw }).then(
      (after) => {
        if (turn === look.turn) paint(painted, after);
      },
      () => 0,
    );
    return [
      make(
        "div.row.maps",
        {},
        figure(canvas, `${channels} channels, −3 to 3`),
        figure(painted, `channel ${look.now.channel} pushed by ${look.now.push.toFixed(1)}`),
      ),
    ];
  },
};
