// The site without a network: what a visitor has seen stays readable. The network comes first, so nothing is ever old;
// what it answers is kept, and shown again when there is none. The models' own files are kept by live/…/worker.js.
const KEPT = "pages";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { request } = event, { origin, pathname } = new URL(request.url);
  if (request.method === "GET" && origin === self.location.origin && !/\/live\/(nano|critters)-/.test(pathname)) {
    event.respondWith(answer(request));
  }
});

async function answer(request) {
  const cache = await caches.open(KEPT);
  try {
    const found = await fetch(request);
    if (found.status === 200) await cache.put(request, found.clone());
    return found;
  } catch (offline) {
    const kept = await cache.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw offline;
  }
}
