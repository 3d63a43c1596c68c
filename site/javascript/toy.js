// A cloud of points, drawn by the visitor, and a network that learns to lead noise there, while one watches.
import { calm, make, slider, toggles } from "./page.js";
import { showPictures } from "./pictures.js";
import { Field, lines, normals, Training, uniforms, walk } from "./plane.js";

const SIDE = 460, // pixels of the paper
  REACH = 3.2, // it shows the plane from -REACH to REACH
  POINTS = 400, // that walk
  STEPS = 24, // of the walk
  MOST = 1500, // examples; more, and the oldest go
  NAMES = { clusters: "eight clusters", ring: "a ring", moons: "two moons", spiral: "a spiral", blank: "blank paper" };

/** Some 600 examples of a kind. */
function examplesOf(kind) {
  const next = uniforms(5),
    count = kind === "blank" ? 0 : 600,
    blur = normals(2 * count, next),
    points = new Float32Array(2 * count);
  for (let i = 0; i < count; i++) {
    const share = next(),
      angle = 2 * Math.PI * (kind === "clusters" ? Math.floor(8 * share) / 8 : share);
    let far = 2,
      at = [0, 0];
    if (kind === "spiral") far = 0.3 + 2 * share;
    const [x, y] = [
      far * Math.cos(kind === "spiral" ? 2 * angle : angle),
      far * Math.sin(kind === "spiral" ? 2 * angle : angle),
    ];
    at = kind === "moons" ? [0.8 * x + (y > 0 ? -0.8 : 0.8), 0.8 * y + (y > 0 ? -0.4 : 0.4)] : [x, y];
    points[2 * i] = at[0] + (kind === "clusters" ? 0.1 : 0.06) * blur[2 * i];
    points[2 * i + 1] = at[1] + (kind === "clusters" ? 0.1 : 0.06) * blur[2 * i + 1];
  }
  return points;
}

/** Puts the toy into a place of a page. */
export function showToy(place) {
  const noise = normals(2 * POINTS, uniforms(1)),
    scatter = uniforms(9);
  let examples = examplesOf("clusters"),
    training = new Training(new Field()),
    path = walk(training.field, noise, STEPS),
    time = 1,
    pointer = matchMedia("(pointer: coarse)").matches ? "asks" : "draws", // a swipe is to scroll the page
    asked = null, // where the pointer or the cursor is: [x, y]
    learning = false,
    walking = false,
    moving, // the next frame of either
    recent = 0, // the loss, averaged
    paths = false;

  const paper = make("canvas.paper", {
      width: SIDE,
      height: SIDE,
      tabindex: 0,
      role: "application",
      "aria-label":
        "The paper: arrow keys move a cursor, Enter adds examples, and what is below says what the network expects from there",
    }),
    status = make("output", { role: "status" }),
    told = make("p.told", {}),
    train = make("button.chief", { type: "button" }, "Train"),
    play = make("button", { type: "button" }, "Walk"),
    clock = slider("time", { min: 0, max: 1, step: 0.01, value: 1 }, (value) => {
      walking = false;
      setTime(value, false);
    }, (value) => `t = ${value.toFixed(2)}`),
    input = clock.querySelector("input");

  // ---------------------------------------------------------------- what is seen

  paper.classList.toggle("scrolls", pointer === "asks");
  const px = (x) => ((x + REACH) / (2 * REACH)) * SIDE,
    py = (y) => SIDE - px(y);

  /** The points at a time: between two steps each moves straight. */
  function pointsAt(t) {
    const at = Math.min((1 - t) * STEPS, STEPS - 1e-9),
      i = Math.floor(at),
      share = at - i;
    return path[i].map((value, k) => value + share * (path[i + 1][k] - value));
  }

  function draw() {
    const context = paper.getContext("2d"),
      style = getComputedStyle(place),
      color = (name) => style.getPropertyValue(name).trim();
    context.clearRect(0, 0, SIDE, SIDE);
    const dots = (points, radius, fill, alpha) => {
      context.globalAlpha = alpha;
      context.fillStyle = fill;
      for (let i = 0; i < points.length; i += 2) {
        context.beginPath();
        context.arc(px(points[i]), py(points[i + 1]), radius, 0, 2 * Math.PI);
        context.fill();
      }
      context.globalAlpha = 1;
    };
    const line = (a, b, stroke, width, alpha) => {
      context.globalAlpha = alpha;
      context.strokeStyle = stroke;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(px(a[0]), py(a[1]));
      context.lineTo(px(b[0]), py(b[1]));
      context.stroke();
      context.globalAlpha = 1;
    };
    dots(examples, 2, color("--links"), 0.45);
    if (paths) {
      for (let k = 0; k < 2 * 60; k += 2) {
        for (let i = 0; i < STEPS; i++) {
          line([path[i][k], path[i][k + 1]], [path[i + 1][k], path[i + 1][k + 1]], color("--red"), 1, 0.35);
        }
      }
    }
    dots(pointsAt(time), 2.4, color("--red"), 0.85);
    if (!asked) return;
    if (examples.length) {
      const t = Math.max(time, 0.02),
        { shares, expected } = lines(examples, ...asked, t),
        most = shares.reduce((a, b) => Math.max(a, b), 0);
      shares.forEach((share, i) => {
        if (share < 0.02 * most) return;
        const end = [examples[2 * i], examples[2 * i + 1]],
          begin = [0, 1].map((k) => end[k] + (asked[k] - end[k]) / t);
        line(begin, end, color("--fg"), 1, 0.05 + 0.3 * (share / most));
      });
      line(asked, expected, color("--links"), 4, 1);
      dots(expected, 6, color("--links"), 1);
    }
    const answer = guess();
    line(asked, answer, color("--red"), 2, 1);
    dots(answer, 4, color("--red"), 1);
    line([asked[0] - 0.1, asked[1]], [asked[0] + 0.1, asked[1]], color("--fg"), 2, 1);
    line([asked[0], asked[1] - 0.1], [asked[0], asked[1] + 0.1], color("--fg"), 2, 1);
  }

  /** The example that the network expects from where the pointer is: x - t·velocity. */
  function guess() {
    const velocity = training.field.velocity(Float32Array.from(asked), Float32Array.of(time));
    return asked.map((value, k) => value - time * velocity[k]);
  }

  const pair = (point) => `(${point.map((value) => value.toFixed(2).replace("-", "−")).join(", ")})`;

  function tell() {
    if (!asked) {
      told.textContent =
        "Point at the paper: thin lines are the straight lines through this place at this time, from noise to an example; blue is where they lead on average, red what the network says.";
    } else {
      const mean = examples.length
        ? pair(lines(examples, ...asked, Math.max(time, 0.02)).expected)
        : "nowhere, as there is no example";
      told.textContent = `From ${pair(asked)} at t = ${
        time.toFixed(2)
      } the lines lead to ${mean} on average; the network says ${pair(guess())}.`;
    }
  }

  function refresh() {
    draw();
    tell();
  }

  function setTime(t, slide = true) {
    time = t;
    if (slide) {
      const text = `t = ${t.toFixed(2)}`;
      input.value = t;
      input.setAttribute("aria-valuetext", text);
      clock.querySelector("output").textContent = text;
    }
    refresh();
  }

  // ---------------------------------------------------------------- learning and walking

  function say() {
    const { done, steps } = training;
    status.value = learning
      ? `Learning: step ${done} of ${steps}, loss ${recent.toFixed(2)}.`
      : done
      ? `Learned for ${done} steps, loss ${recent.toFixed(2)}.`
      : "Nothing learned yet: the red points are noise, and Walk leads them nowhere. Press Train.";
    train.textContent = learning ? "Stop" : done && done < steps ? "Go on" : "Train";
  }

  /** Learn for a while in every frame, so that the page stays awake; now and then, walk anew. */
  function learn() {
    if (learning || examples.length < 20) {
      if (examples.length < 20) status.value = "Draw a cloud first.";
      return;
    }
    if (training.done >= training.steps) training = new Training(new Field());
    learning = true;
    walking = false;
    if (!calm()) setTime(0);
    let shown = performance.now();
    const frame = () => {
      if (!learning || !place.isConnected) return;
      for (const began = performance.now(); performance.now() - began < 14 && training.done < training.steps;) {
        const loss = training.step(examples);
        recent = training.done === 1 ? loss : 0.98 * recent + 0.02 * loss;
      }
      const finished = training.done >= training.steps;
      if (finished || performance.now() - shown > 400) {
        path = walk(training.field, noise, STEPS);
        if (finished) learning = false;
        if (finished || !calm()) refresh();
        say();
        shown = performance.now();
      }
      if (!finished) moving = requestAnimationFrame(frame);
      else if (calm()) setTime(0);
      else stroll();
    };
    say();
    cancelAnimationFrame(moving);
    moving = requestAnimationFrame(frame);
  }

  function pause() {
    learning = false;
    path = walk(training.field, noise, STEPS);
    refresh();
    say();
  }

  /** From time 1 to 0 in three seconds. Who asked for less motion gets the two ends only. */
  function stroll() {
    if (calm()) return setTime(time > 0 ? 0 : 1);
    walking = true;
    const began = performance.now();
    const frame = (now) => {
      if (!walking || !place.isConnected) return;
      setTime(Math.min(1, Math.max(0, 1 - (now - began) / 3000)));
      if (time > 0) moving = requestAnimationFrame(frame);
      else walking = false;
    };
    cancelAnimationFrame(moving);
    moving = requestAnimationFrame(frame);
  }

  /** Other examples: what was learned of the ones before is forgotten. */
  function begin(points) {
    learning = walking = false;
    examples = points;
    training = new Training(new Field());
    path = walk(training.field, noise, STEPS);
    setTime(1);
    say();
  }

  // ---------------------------------------------------------------- pointer and keys

  /** Four examples around a place. */
  function add([x, y]) {
    const more = normals(8, scatter).map((value, i) => 0.07 * value + (i % 2 ? y : x)),
      all = new Float32Array(examples.length + more.length);
    all.set(examples);
    all.set(more, examples.length);
    examples = all.subarray(Math.max(0, all.length - 2 * MOST)).slice();
  }

  function placeOf(event) {
    const box = paper.getBoundingClientRect(),
      of = (share) => Math.min(REACH, Math.max(-REACH, (2 * share - 1) * REACH));
    return [of((event.clientX - box.left) / box.width), -of((event.clientY - box.top) / box.height)];
  }

  let drawing = false;
  paper.onpointerdown = (event) => {
    asked = placeOf(event);
    drawing = pointer === "draws" && event.button === 0;
    if (drawing) {
      paper.setPointerCapture(event.pointerId);
      learning = walking = false;
      add(asked);
    }
    refresh();
  };
  paper.onpointermove = (event) => {
    asked = placeOf(event);
    if (drawing) add(asked);
    if (!walking && !learning) refresh();
  };
  paper.onpointerup = paper.onpointercancel = () => {
    if (!drawing) return;
    drawing = false;
    training = new Training(new Field());
    learn();
  };
  paper.onpointerleave = () => {
    if (document.activeElement === paper || drawing) return;
    asked = null;
    refresh();
  };
  paper.onfocus = () => {
    asked ??= [0, 0];
    refresh();
  };
  paper.onkeydown = (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] },
      step = event.shiftKey ? 0.5 : 0.1;
    if (moves[event.key]) {
      asked = asked.map((value, k) => Math.min(REACH, Math.max(-REACH, value + step * moves[event.key][k])));
    } else if (event.key === "Enter") add(asked);
    else return;
    event.preventDefault();
    event.stopPropagation(); // to mdBook an arrow means the next page
    refresh();
  };

  train.onclick = () => (learning ? pause() : learn());
  play.onclick = () => {
    if (learning) pause();
    stroll();
  };
  place.replaceChildren(
    make(
      "div.stage",
      {},
      make("div", {}, paper),
      make(
        "div.side",
        {},
        make("div.row", {}, train, play),
        make("p", {}, status),
        clock,
        toggles(
          "examples",
          Object.entries(NAMES).map(([kind, name]) => [name, kind]),
          "clusters",
          (kind) => begin(examplesOf(kind)),
        ),
        toggles("the pointer", [["pointer draws", "draws"], ["pointer asks", "asks"]], pointer, (value) => {
          pointer = value;
          paper.classList.toggle("scrolls", pointer === "asks");
        }),
        toggles("paths", [["points", false], ["points and paths", true]], paths, (value) => {
          paths = value;
          refresh();
        }),
        told,
      ),
    ),
  );
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["class"] }); // another theme
  refresh();
  say();
}

const page = document.querySelector("#live-toy");
if (page) {
  let leave;
  const show = (tab) => {
    leave?.();
    const place = make("div", {});
    page.replaceChildren(tabs, place);
    leave = { points: showToy, pictures: showPictures }[tab](place);
  };
  const first = location.hash === "#pictures" ? "pictures" : "points",
    tabs = toggles("what learns", [["points in the plane", "points"], ["pictures", "pictures"]], first, show);
  show(first);
}
