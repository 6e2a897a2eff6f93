"use strict";
// When the server reports a change, fetches this page again and replaces the parts with data-live.
const { events } = document.body.dataset;
if (events) {
  const connection = document.getElementById("connection");
  let isBusy = false, isStale = false;

  const refresh = async () => {
    // A hidden page waits, and so does one in which a reader selects text.
    if (isBusy || document.hidden || !getSelection().isCollapsed) { isStale = true; return; }
    isBusy = true;
    isStale = false;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      connection.textContent = answer.ok ? "live" : page.querySelector("main .bad").textContent;
      for (const old of answer.ok ? document.querySelectorAll("[data-live]") : []) {
        const focused = old.contains(document.activeElement) && document.activeElement.getAttribute("href");
        const scrolled = old.querySelector(".scroll")?.scrollLeft;
        old.replaceChildren(...page.getElementById(old.id).childNodes);
        if (scrolled) old.querySelector(".scroll").scrollLeft = scrolled;
        if (focused) old.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
      }
    } catch {
      connection.textContent = "connection lost";
    }
    isBusy = false;
  };

  const source = new EventSource(events);
  source.onopen = () => { connection.textContent = "live"; };
  source.onerror = () => { connection.textContent = "connection lost"; };
  source.onmessage = refresh;
  for (const moment of ["visibilitychange", "selectionchange"]) {
    document.addEventListener(moment, () => isStale && refresh());
  }
}
