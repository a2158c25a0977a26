// Keys, and a choice that stays on the screen until it is saved. Without this file the forms work as
// they are.
"use strict";

let sending = false;

function note(text) {
  const place = document.getElementById("note");
  place.textContent = text;
  place.classList.add("bad");
}

async function send(form, button) {
  if (sending) return;
  sending = true;
  const fields = new URLSearchParams(new FormData(form));
  if (button && button.name) fields.set(button.name, button.value);
  form.classList.add("sending");
  try {
    const reply = await fetch(form.action, { method: "POST", body: fields });
    const next = new DOMParser().parseFromString(await reply.text(), "text/html");
    if (reply.ok) {
      document.getElementById("page").replaceWith(next.getElementById("page"));
      scrollTo(0, 0);
    } else {
      const alert = next.querySelector("[role=alert]");
      note(alert ? alert.textContent : "Not saved: the server refused it.");
    }
  } catch (error) {
    note("Not saved: the server does not answer. Your answer is still here; try again.");
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
  if (key === "r" && reason) {
    event.preventDefault();
    reason.focus();
  }
  if (!/^[12tbsu]$/.test(key)) return;
  const button = document.querySelector(`button[aria-keyshortcuts="${key}"]:not(:disabled)`);
  if (!button) return;
  event.preventDefault();
  button.form.requestSubmit(button);
});
