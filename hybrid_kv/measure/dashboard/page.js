"use strict";
// One state: the machine. An element with data-view is shown if it names the machine, one with data-machine also if none
// is chosen. The page is complete without this script, for all machines.
(() => {
  const machine = document.getElementById("machine");
  const filter = document.getElementById("filter");
  const views = [...document.querySelectorAll("[data-view]")];
  const lines = [...document.querySelectorAll("#series > tr")];

  function show() {
    const name = machine.value;
    const seen = views.some((view) => view.dataset.view === name) ? name : ""; // the page has views of a few machines
    for (const view of views) view.hidden = view.dataset.view !== seen;
    for (const block of document.querySelectorAll("[data-machine]")) {
      block.hidden = Boolean(name && block.dataset.machine && block.dataset.machine !== name);
    }
    const words = (filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    for (const line of lines) {
      const text = line.firstElementChild.textContent.toLowerCase();
      line.hidden ||= !words.every((word) => text.includes(word));
    }
  }

  // Links into a folded section open it.
  function unfold() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const details = target && target.querySelector("details");
    if (details) details.open = true;
  }

  async function copy({ currentTarget: button }) {
    const command = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(command); // a page from a disk may have no clipboard
    }
  }

  machine.addEventListener("change", show);
  filter?.addEventListener("input", show);
  addEventListener("hashchange", unfold);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", copy);
  show();
  unfold();
  document.documentElement.dataset.ready = "true";
})();
