// The brush with which a visitor paints the part of a picture that is to be drawn anew.
import { make } from "./page.js";

const WIDE = 9; // pixels from the middle of the brush to its edge

/** A sheet over a canvas, on which a pointer or the keyboard paints a mask: (H, W), 255 where it is drawn anew, else 0. */
export class Brush {
  /** changed: called whenever the mask is another one. */
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.sheet = make("canvas.sheet", {
      hidden: true,
      tabindex: 0,
      role: "application",
      "aria-label": "Paint what is to be drawn anew: arrow keys move the brush, Enter paints",
    });
    this.set(null);
    this.changed = changed;
    this.sheet.onpointerdown = (event) => {
      this.sheet.setPointerCapture(event.pointerId);
      this.down = true;
      this.paintAt(...this.placeOf(event));
    };
    this.sheet.onpointermove = (event) => {
      if (this.down) this.paintAt(...this.placeOf(event));
    };
    this.sheet.onpointerup = this.sheet.onpointercancel = () => (this.down = false);
    this.sheet.onfocus = this.sheet.onblur = () => this.draw();
    this.sheet.onkeydown = (event) => {
      const move = { ArrowLeft: [-4, 0], ArrowRight: [4, 0], ArrowUp: [0, -4], ArrowDown: [0, 4] }[event.key];
      if (!move && event.key !== "Enter") return;
      event.preventDefault();
      event.stopPropagation(); // to mdBook an arrow means the next page
      if (move) {
        this.x = Math.min(this.width - 1, Math.max(0, this.x + move[0]));
        this.y = Math.min(this.height - 1, Math.max(0, this.y + move[1]));
        this.draw();
      } else this.paintAt(this.x, this.y);
    };
  }

  /** A mask of the canvas' size; null: nothing painted. */
  set(mask) {
    this.width = this.sheet.width = this.canvas.width;
    this.height = this.sheet.height = this.canvas.height;
    this.x = this.width / 2;
    this.y = this.height / 2;
    this.mask = mask?.slice() ?? new Uint8Array(this.width * this.height);
    this.draw();
    this.changed?.();
  }

  placeOf(event) {
    const box = this.sheet.getBoundingClientRect();
    return [
      ((event.clientX - box.left) / box.width) * this.width,
      ((event.clientY - box.top) / box.height) * this.height,
    ];
  }

  paintAt(x, y) {
    for (let i = 0; i < this.mask.length; i++) {
      if (Math.hypot((i % this.width) + 0.5 - x, Math.floor(i / this.width) + 0.5 - y) < WIDE) this.mask[i] = 255;
    }
    [this.x, this.y] = [x, y];
    this.draw();
    this.changed();
  }

  draw() {
    const context = this.sheet.getContext("2d"),
      rgba = new Uint8ClampedArray(4 * this.mask.length);
    this.mask.forEach((value, i) => {
      const stripe = ((i % this.width) + Math.floor(i / this.width)) % 6 < 3; // seen on every color
      if (value) rgba.set(stripe ? [255, 255, 255, 170] : [30, 30, 60, 130], 4 * i);
    });
    context.putImageData(new ImageData(rgba, this.width, this.height), 0, 0);
    if (document.activeElement !== this.sheet || this.down) return;
    context.strokeStyle = "#fff";
    context.beginPath();
    context.arc(this.x, this.y, WIDE, 0, 2 * Math.PI);
    context.stroke();
  }

  /** The mask; null if nothing is painted. */
  painted() {
    return this.mask.includes(255) ? this.mask.slice() : null;
  }
}
