// The world that a page shows, and what its model is: `?world=critters` of the address says which, or else the page.
import { WORLDS } from "./model.js";
import { make } from "./page.js";

const page = self.document, // none in the worker, whose address says it always
  told = new URL(self.location).searchParams.get("world") ?? "",
  home = page?.querySelector("#live-draw-compact") && !page.querySelector("#live-draw");

export const WORLD = Object.hasOwn(WORLDS, told) ? told : home ? "critters" : "shapes";
export const { MODEL, FOLDER, BYTES, SIZE, FILES, LIMITS, ADAPTER, STORED, STILLS, SCORES } = WORLDS[WORLD];

/** Links to the same page in each world. */
export const worlds = () =>
  make(
    "nav.worlds",
    { "aria-label": "World" },
    ...Object.keys(WORLDS).map((name) => {
      const search = new URLSearchParams(location.search);
      search.set("world", name);
      return make("a", { href: `?${search}`, "aria-current": name === WORLD && "true" }, name);
    }),
  );
