// What Look inside shows: the runs that were drawn, and what is chosen in them.

export const look = {
  runs: [], // one or two: {prompt, seed, read, steps}
  now: { // what a link carries, beside the sentences and the seed
    view: "picture",
    step: 1,
    block: -1,
    head: -1,
    patch: 0,
    token: 0,
    layer: 0,
    textHead: -1,
    channel: 0,
    push: 4,
    row: 40,
    column: 4,
    stream: "img",
    cut: "block",
    gate: 2,
    mate: 4,
  },
  painter: null, // once something is drawn
  turn: 0, // grows whenever something else is shown
  show: () => {}, // the page's: shows what is chosen

  /** Chooses something. controls: they have to change with it. */
  set(change, controls = false) {
    Object.assign(this.now, change);
    this.turn++;
    this.show(controls);
    this.remember();
  },

  /** What is chosen, into the address; soon, as browsers refuse more than a hundred of these in half a minute. */
  remember() {
    clearTimeout(this.written);
    this.written = setTimeout(() => this.writeAddress(), 300);
  },

  writeAddress() {
    const [first, other] = this.runs;
    const words = { prompt: first.prompt, ...(other && { other: other.prompt }), seed: first.seed };
    history.replaceState(null, "", `#${new URLSearchParams({ ...words, ...this.now })}`);
  },
};
