// Follows a job's events, or looks again every so often, and takes the new state from where the link "Refresh" leads:
// the page's own address answers only a POST after a refused form. Without this script the link does the same.
"use strict";
(() => {
  const live = document.getElementById("live");
  const status = document.getElementById("status");
  const address = document.querySelector(".more a")?.href;
  if (!live || !status || !address) return;
  const REST_MS = 400;      // between two looks
  const RETRY_MS = 3000;    // after the service did not answer
  let source = null;
  let timer = 0;
  let looking = false;
  let again = false;

  const say = (text) => { if (status.textContent !== text) status.textContent = text; };
  const later = (milliseconds) => { if (!timer) timer = setTimeout(look, milliseconds); };

  async function look() {
    timer = 0;
    if (looking) { again = true; return; }
    looking = true;
    try {
      const answer = await fetch(address, { headers: { Accept: "text/html" }, cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok || !page.getElementById("live")) throw new Error(String(answer.status));
      take(page);
      follow();
    } catch {
      say("The service does not answer; trying again.");
      again = false;
      later(RETRY_MS);
    }
    looking = false;
    if (again) { again = false; later(REST_MS); }
  }

  function take(page) {
    const next = page.getElementById("live");
    say(page.getElementById("status").textContent);
    document.title = page.title;
    for (const name of ["events", "poll"]) {
      if (name in next.dataset) live.dataset[name] = next.dataset[name]; else delete live.dataset[name];
    }
    if (live.innerHTML === next.innerHTML) return;
    const focused = live.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && [...live.querySelectorAll("[tabindex]")].indexOf(focused);
    const open = [...live.querySelectorAll("details[open]")].map((details) => details.id);
    const lefts = [...live.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
    live.replaceChildren(...next.childNodes);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    live.querySelectorAll(".scroll").forEach((box, at) => { box.scrollLeft = lefts[at] ?? 0; });
    if (focused) {
      const same = focused.id ? document.getElementById(focused.id) : live.querySelectorAll("[tabindex]")[place];
      (same ?? document.getElementById("main")).focus({ preventScroll: true });
    }
  }

  function follow() {
    const url = live.dataset.events;
    if (!url && source) { source.close(); source = null; }
    if (url && !source) {
      source = new EventSource(url);
      for (const kind of ["open", "message", ...live.dataset.kinds.split(" ")]) {
        source.addEventListener(kind, () => later(REST_MS));
      }
      source.addEventListener("error", () => {
        if (source?.readyState === EventSource.CLOSED) source = null;   // otherwise the browser connects again
        later(RETRY_MS);
      });
    }
    if (live.dataset.poll) later(Number(live.dataset.poll));
  }

  follow();
})();
