// The worker, as a page sees it: ask for something, hear what comes, wait for the end.

import { WORLD } from "./world.js";

export class Painter {
  constructor() {
    const url = new URL("worker.js", import.meta.url),
      told = new URL(location).searchParams;
    url.searchParams.set("world", WORLD);
    for (const name of ["wasm", "patience"]) { // ?wasm=0: to see what WebAssembly is good for; the other is the tests'
      if (told.has(name)) url.searchParams.set(name, told.get(name));
    }
    this.worker = new Worker(url, { type: "module" });
    this.count = 0;
    this.asked = new Map();
    this.worker.onmessage = ({ data }) => {
      const asked = this.asked.get(data.id);
      if (!asked) return;
      if (data.kind === "done" || data.kind === "error") this.asked.delete(data.id);
      if (data.kind === "done") asked.resolve(data);
      else if (data.kind === "error") asked.reject(new Error(data.text));
      else asked.heard[data.kind]?.(data);
    };
    this.worker.onerror = () => {
      for (const { reject } of this.asked.values()) {
        reject(new Error("This browser cannot start the script that draws (a module in a worker): a newer one can."));
      }
      this.asked.clear();
    };
  }

  /** A promise of the end. heard: a function for each kind of message before it. */
  ask(kind, wish, heard = {}) {
    return new Promise((resolve, reject) => {
      this.asked.set(++this.count, { resolve, reject, heard });
      this.worker.postMessage({ id: this.count, kind, ...wish });
    });
  }

  stop() {
    this.worker.postMessage({ id: ++this.count, kind: "stop" });
  }
}
