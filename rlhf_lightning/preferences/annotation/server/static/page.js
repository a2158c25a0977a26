// Keys, time on the pair, and answers that stay on the screen until they are saved. Without this
// file the forms work as they are.
"use strict";

const KEYS = { 1: "left", 2: "right", t: "tie", b: "both_bad", s: "skip" };
let shownAt = 0; // when this pair was last seen to appear, in milliseconds; 0 while it is hidden
let sending = false;

const answerForm = () => document.getElementById("answer");
const slot = () => "milliseconds:" + answerForm().dataset.assignment;

// Time counts while the page can be seen. It survives a reload in the tab's own storage.
function spent() {
  const before = Number(sessionStorage.getItem(slot())) || 0;
  return before + (shownAt ? performance.now() - shownAt : 0);
}

function watch() {
  if (!answerForm()) return;
  if (document.hidden) {
    sessionStorage.setItem(slot(), String(spent()));
    shownAt = 0;
  } else if (!shownAt) {
    shownAt = performance.now();
  }
}

function note(text, bad) {
  const place = document.getElementById("note");
  if (!place) return;
  place.textContent = text;
  place.classList.toggle("bad", Boolean(bad));
}

function show(html) {
  const next = new DOMParser().parseFromString(html, "text/html");
  document.getElementById("page").replaceWith(next.getElementById("page"));
  document.title = next.title;
  scrollTo(0, 0);
  shownAt = 0;
  watch();
}

async function send(form, button) {
  if (sending) return;
  sending = true;
  const fields = new URLSearchParams(new FormData(form));
  if (button && button.name) fields.set(button.name, button.value);
  fields.set("at_once", "1"); // the answer is the next page, not the way to it
  if (form.id === "answer") fields.set("seconds", (spent() / 1000).toFixed(3));
  form.classList.add("sending");
  try {
    const reply = await fetch(form.action, { method: "POST", body: fields });
    const html = await reply.text();
    if (reply.ok) {
      if (form.id === "answer") sessionStorage.removeItem(slot());
      show(html);
    } else {
      const said = new DOMParser().parseFromString(html, "text/html").querySelector("[role=alert]");
      note(said ? said.textContent : "Not saved: the server refused it.", true);
    }
  } catch (error) {
    note("Not saved: the server does not answer. Your answer is still here; try again.", true);
  } finally {
    sending = false;
    form.classList.remove("sending");
  }
}

document.addEventListener("submit", (event) => {
  if (event.target.id !== "answer" && event.target.id !== "undo") return;
  event.preventDefault();
  send(event.target, event.submitter);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.isComposing) return;
  const reason = document.querySelector(".reason");
  if (event.target === reason) {
    if (event.key === "Escape" || event.key === "Enter") {
      event.preventDefault();
      reason.blur();
    }
    return;
  }
  if (event.target instanceof HTMLInputElement) return;
  // The digit's own key as well: on some keyboards it gives 1 only with Shift.
  const digit = /^(?:Digit|Numpad)([12])$/.exec(event.code);
  const key = digit ? digit[1] : event.key.toLowerCase();
  let button = null;
  if (key in KEYS) button = document.querySelector(`button[value="${KEYS[key]}"]`);
  if (key === "u") button = document.querySelector('button[form="undo"]:not(:disabled)');
  if (key === "r" && reason) {
    event.preventDefault();
    reason.focus();
  }
  if (!button) return;
  event.preventDefault();
  button.classList.add("pressed");
  button.form.requestSubmit(button);
  setTimeout(() => button.classList.remove("pressed"), 150);
});

document.addEventListener("visibilitychange", watch);
addEventListener("pagehide", () => {
  if (answerForm()) sessionStorage.setItem(slot(), String(spent()));
});
watch();
