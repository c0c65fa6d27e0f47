// The API page: shows the operations of /openapi.json and sends requests that a reader fills in.
// It knows OpenAPI, nothing of contacts. Texts from outside only ever become text nodes.
"use strict";

const METHODS = ["get", "post", "put", "patch", "delete"];

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function resolve(api, schema) {
  const path = schema?.$ref?.replace(/^#\//, "").split("/");
  return path ? path.reduce((at, step) => at?.[step], api) : schema;
}

/** A value that fits a schema: its example, else something made from its properties. */
function sample(api, schema, depth = 0) {
  const it = resolve(api, schema);
  if (!it || depth > 6) return null;
  if (it.example !== undefined) return it.example;
  if (it.properties) {
    return Object.fromEntries(Object.entries(it.properties)
      .map(([name, inner]) => [name, sample(api, inner, depth + 1)]));
  }
  if (it.items) return [sample(api, it.items, depth + 1)];
  if (it.format === "uuid") return "00000000-0000-0000-0000-000000000000";
  const type = [it.type].flat().find((one) => one !== "null");
  return { string: "", integer: 0, number: 0, boolean: false }[type] ?? null;
}

function parameterFields(operation, prefix) {
  return (operation.parameters ?? []).map((parameter) => {
    const id = `${prefix}-${parameter.in}-${parameter.name}`;
    const input = element("input", { id, "data-in": parameter.in, "data-name": parameter.name,
      autocomplete: "off", placeholder: String(parameter.schema?.default ?? "") });
    input.required = Boolean(parameter.required);
    const note = `(${parameter.in}${parameter.required ? "" : ", optional"}) `;
    return element("div", { class: "field" },
      element("label", { for: id }, parameter.name, " ", element("small", {}, note,
        parameter.description ?? "")), input);
  });
}

function responseTable(operation) {
  const rows = Object.entries(operation.responses ?? {}).map(([status, response]) =>
    element("tr", {}, element("th", { scope: "row" }, status),
      element("td", {}, response.description ?? ""),
      element("td", {}, Object.keys(response.headers ?? {}).join(", "))));
  return element("table", {}, element("thead", {}, element("tr", {},
    ...["Status", "Meaning", "Headers"].map((text) => element("th", { scope: "col" }, text)))),
  element("tbody", {}, ...rows));
}

/** The answer's text; of a stream without an end, what comes first. */
async function bodyOf(answer) {
  const streams = answer.headers.get("content-type")?.startsWith("text/event-stream");
  if (!streams) return answer.text();
  const reader = answer.body.getReader();
  const { value } = await reader.read();
  await reader.cancel();
  return new TextDecoder().decode(value);
}

async function send(method, path, fields, body) {
  const query = new URLSearchParams();
  const headers = {};
  for (const input of fields) {
    const { in: place, name } = input.dataset;
    if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (!input.value) continue;
    else if (place === "query") query.append(name, input.value);
    else if (place === "header") headers[name] = input.value;
  }
  if (body !== undefined) headers["content-type"] = "application/json";
  const search = query.size > 0 ? `?${query}` : "";
  const answer = await fetch(path + search, { method: method.toUpperCase(), headers, body });
  const text = await bodyOf(answer);
  let shown = text;
  try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it is */ }
  const head = [...answer.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
  return `${answer.status} ${answer.statusText}\n${head}\n\n${shown}`;
}

function operationView(api, method, path, operation) {
  const prefix = `${method}-${path}`.replaceAll(/[^a-z0-9]+/gi, "-");
  const fields = parameterFields(operation, prefix);
  const form = element("form", {}, ...fields);
  const json = operation.requestBody?.content?.["application/json"];
  let body = null;
  if (json) {
    const text = JSON.stringify(json.example ?? sample(api, json.schema), null, 2);
    body = element("textarea", { id: `${prefix}-body`, rows: String(text.split("\n").length),
      spellcheck: "false" });
    body.value = text;
    form.append(element("div", { class: "field" },
      element("label", { for: body.id }, "Body"), body));
  }
  const output = element("pre", { hidden: "", "data-testid": `${prefix}-answer`, tabindex: "0",
    "aria-live": "polite" });
  form.append(element("button", { class: "primary", "data-testid": `${prefix}-send` }, "Send"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    output.hidden = false;
    output.textContent = "…";
    const inputs = [...form.querySelectorAll("input")];
    output.textContent = await send(method, path, inputs, body?.value)
      .catch((error) => `not sent: ${error.message}`);
  });
  return element("details", { class: "operation", "data-testid": prefix },
    element("summary", {}, element("span", { class: "method" }, method.toUpperCase()), " ",
      element("code", {}, path), ` ${operation.summary ?? ""}`),
    element("div", {}, element("p", { class: "quiet" }, operation.description ?? ""), form, output,
      element("h3", {}, "Answers"), responseTable(operation)));
}

async function show() {
  const place = document.getElementById("operations");
  try {
    const api = await (await fetch("/openapi.json")).json();
    const views = Object.entries(api.paths).flatMap(([path, item]) =>
      METHODS.filter((method) => item[method])
        .map((method) => operationView(api, method, path, item[method])));
    place.replaceChildren(...views);
  } catch (error) {
    place.textContent = `The OpenAPI document cannot be read: ${error.message}`;
  }
}

show();
