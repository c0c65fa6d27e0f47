// The contacts page: creates, edits and deletes contacts through the API, and shows their events
// as the receiver hands them on. Texts from outside only ever become text nodes.
"use strict";

const MAX_EVENTS_SHOWN = 200;
const FIELDS = ["firstName", "lastName", "email", "companyName", "description"];

const at = (id) => document.getElementById(id);
const form = at("contact-form");

/** The contact being edited, as it was read, with its ETag; null while creating. */
let editing = null;
/** Where the next page of contacts begins. */
let continuation = null;
/** The last reload that was asked for: an answer to an older one is dropped. */
let reloads = 0;
/** Ids of the events on the page: after a reconnect the server may send some again. */
const shown = new Set();

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function say(text, failed = false) {
  at("message").textContent = text;
  at("message").classList.toggle("failed", failed);
}

async function call(method, path, body, etag) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (etag) headers["if-match"] = etag;
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    throw { detail: "the service cannot be reached" };
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({ detail: `status ${answer.status}` }));
  throw { ...problem, status: answer.status };
}

function showErrors(errors) {
  for (const field of FIELDS) {
    const texts = errors[field] ?? [];
    at(`${field}-error`).textContent = texts.join("; ");
    at(field).setAttribute("aria-invalid", String(texts.length > 0));
  }
  const first = FIELDS.find((field) => errors[field]);
  if (first) at(first).focus();
}

function startCreating() {
  editing = null;
  form.reset();
  showErrors({});
  at("form-title").textContent = "New contact";
  at("save").textContent = "Create";
  at("cancel").hidden = true;
}

async function startEditing(id) {
  const answer = await call("GET", `/api/contacts/${id}`);
  const contact = await answer.json();
  editing = { contact, etag: answer.headers.get("etag") };
  showErrors({});
  at("firstName").value = contact.name.firstName;
  at("lastName").value = contact.name.lastName;
  at("email").value = contact.email ?? "";
  at("companyName").value = contact.company.companyName;
  at("description").value = contact.description ?? "";
  at("form-title").textContent = "Edit contact";
  at("save").textContent = "Save";
  at("cancel").hidden = false;
  at("firstName").focus();
}

function entered() {
  const text = Object.fromEntries(FIELDS.map((field) => [field, at(field).value]));
  return { ...text, email: text.email || null, description: text.description || null };
}

/** Sends one request for each part that was changed, every one on the version the last left. */
async function saveEdits(values) {
  const { contact } = editing;
  const steps = [];
  const { firstName, lastName } = values;
  if (firstName !== contact.name.firstName || lastName !== contact.name.lastName) {
    steps.push(["update-name", { firstName, lastName }]);
  }
  if (values.email !== contact.email) steps.push(["update-email", { email: values.email }]);
  if (values.companyName !== contact.company.companyName) {
    steps.push(["update-company", { ...contact.company, companyName: values.companyName }]);
  }
  if (values.description !== contact.description) {
    steps.push(["update-description", { description: values.description }]);
  }
  for (const [action, body] of steps) {
    const answer = await call("POST", `/api/contacts/${contact.id}/${action}`, body, editing.etag);
    editing.etag = answer.headers.get("etag");
  }
  return steps.length > 0 ? "Saved." : "Nothing was changed.";
}

async function save(event) {
  event.preventDefault();
  at("save").disabled = true;
  showErrors({});
  try {
    const values = entered();
    let done = "Created.";
    if (editing) done = await saveEdits(values);
    else await call("POST", "/api/contacts", values);
    startCreating();
    say(done);
  } catch (problem) {
    await explain(problem);
  } finally {
    at("save").disabled = false;
    await reload();
  }
}

async function explain(problem) {
  if (problem.errors) showErrors(problem.errors);
  say(problem.detail ?? String(problem), true);
  if (problem.status === 412 && editing) {
    const { id } = editing.contact;
    await startEditing(id).catch(() => startCreating());
  } else if (problem.status === 404) {
    startCreating();
  }
}

function askToDelete(contact) {
  at("delete-name").textContent = contact.fullName;
  at("confirm-delete").onclick = async () => {
    at("delete-dialog").close();
    try {
      await call("DELETE", `/api/contacts/${contact.id}`);
      if (editing?.contact.id === contact.id) startCreating();
      say("Deleted.");
    } catch (problem) {
      await explain(problem);
    }
    await reload();
  };
  at("delete-dialog").showModal();
}

function contactRow(contact) {
  const button = (label, act, kind) => {
    const made = element("button", {
      type: "button", class: kind, "data-testid": label.toLowerCase(),
      "aria-label": `${label} ${contact.fullName}`,
    }, label);
    made.addEventListener("click", act);
    return made;
  };
  const about = [contact.companyName, contact.email].filter(Boolean).join(" · ");
  return element("li", {
    class: "contact", "data-testid": "contact", "data-contact-id": contact.id,
  },
    element("strong", { "data-testid": "full-name" }, contact.fullName),
    element("span", { class: "about" }, about),
    element("span", { class: "buttons" },
      button("Edit", () => startEditing(contact.id).catch(explain), ""),
      button("Delete", () => askToDelete(contact), "danger")));
}

async function loadPage(token) {
  const headers = token ? { "x-continuation-token": token } : {};
  const answer = await fetch("/api/contacts?pageSize=50", { headers });
  if (!answer.ok) throw { detail: `the list cannot be read: status ${answer.status}` };
  const { items } = await answer.json();
  return { rows: items.map(contactRow), next: answer.headers.get("x-continuation-token") };
}

function showPage(page) {
  continuation = page.next;
  at("more").hidden = !continuation;
  at("no-contacts").hidden = at("contacts").childElementCount > 0;
}

async function reload() {
  const mine = ++reloads;
  try {
    const page = await loadPage(null);
    if (mine !== reloads) return;
    at("contacts").replaceChildren(...page.rows);
    showPage(page);
  } catch (problem) {
    say(problem.detail ?? "the list cannot be read", true);
  }
}

async function showMore() {
  const mine = reloads;
  const page = await loadPage(continuation).catch(() => null);
  if (!page || mine !== reloads) return;
  at("contacts").append(...page.rows);
  showPage(page);
}

function showEvent(event) {
  if (shown.has(event.id)) return;
  shown.add(event.id);
  const list = at("events");
  const following = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  const fact = (name, value) => [element("dt", {}, name), element("dd", {}, value)];
  list.append(element("li", {
    class: "event", "data-testid": "event", "data-event-id": event.id,
    "data-event-type": event.type, "data-event-key": event.key, "data-number": event.number,
  },
    element("h3", {},
      element("span", { class: "number" }, `#${event.number} `),
      element("span", { "data-testid": "event-subject" }, event.type)),
    element("dl", {}, ...fact("id", event.id), ...fact("key", event.key)),
    element("pre", { "data-testid": "event-payload", tabindex: "0" },
      JSON.stringify(event.payload, null, 2))));
  if (list.childElementCount > MAX_EVENTS_SHOWN) {
    shown.delete(list.firstElementChild.dataset.eventId);
    list.firstElementChild.remove();
  }
  if (following) list.scrollTop = list.scrollHeight;
  at("no-events").hidden = true;
}

function listen() {
  const state = (name) => {
    at("connection").textContent = name;
    at("connection").dataset.state = name;
  };
  const stream = new EventSource("/api/events");
  let due = null;
  stream.onopen = () => state("live");
  stream.onerror = () => {
    state("reconnecting");
    // After an answer other than 200 the browser gives up; a new stream is ours to begin.
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
  stream.onmessage = (message) => {
    showEvent(JSON.parse(message.data));
    // Others may change contacts too: the list follows the events, once for many.
    due ??= setTimeout(() => { due = null; reload(); }, 150);
  };
}

form.addEventListener("submit", save);
at("cancel").addEventListener("click", () => { startCreating(); say(""); });
at("keep").addEventListener("click", () => at("delete-dialog").close());
at("more").addEventListener("click", showMore);
startCreating();
reload();
listen();
