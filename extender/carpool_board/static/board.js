"use strict";
// When the server reports a change, fetches this page again and replaces the parts with data-live.
const { events } = document.body.dataset;
if (events) {
  const connection = document.getElementById("connection");
  let source, isBusy = false, isStale = false;

  const refresh = async () => {
    // A page in which a reader selects text waits.
    isStale = true;
    if (isBusy || !getSelection().isCollapsed) return;
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
    if (isStale) refresh();
  };

  // Only a page that is shown has a connection: a browser opens six to a host, over HTTP/1.1.
  const connect = () => {
    source?.close();
    if (document.hidden) return;
    source = new EventSource(events);
    source.onopen = refresh;
    source.onmessage = refresh;
    source.onerror = () => { connection.textContent = "connection lost"; };
  };
  connect();
  document.addEventListener("visibilitychange", connect);
  document.addEventListener("selectionchange", () => isStale && refresh());
}
