// What Microsoft's client for JavaScript does with a container that Postrider writes to.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline";
import { BulkOperationType, ChangeFeedStartFrom, CosmosClient } from "@azure/cosmos";

const client = new CosmosClient({
  endpoint: process.env.COSMOS_ENDPOINT,
  key: process.env.COSMOS_KEY,
});
const contacts = client.database("shop").container("contacts");

function event(action, seq) {
  return {
    id: randomUUID(),
    partitionKey: "c1",
    type: "domainEvent",
    data: { contactId: "c1", action },
    ttl: 864000,
    seq,
  };
}

async function save(action, etag) {
  const { resource: contact } = await contacts.item("c1", "c1").read();
  contact.lastSeq += 1;
  contact.data.changedBy = action;
  const operations = [
    {
      operationType: BulkOperationType.Replace,
      id: "c1",
      resourceBody: contact,
      ifMatch: etag ?? contact._etag,
    },
    { operationType: BulkOperationType.Create, resourceBody: event(action, contact.lastSeq) },
  ];
  const { result } = await contacts.items.batch(operations, "c1");
  return result.map((one) => one.statusCode);
}

/** Reads changes up to the present; returns the events' actions and where to go on. */
async function changes(from) {
  const iterator = contacts.items.getChangeFeedIterator({ changeFeedStartFrom: from });
  const seen = [];
  for (;;) {
    const page = await iterator.readNext();
    if (page.statusCode === 304) {
      return [seen, page.continuationToken];
    }
    const events = page.result.filter((one) => one.type === "domainEvent");
    seen.push(...events.map((one) => one.data.action));
  }
}

// What Postrider wrote, by id, by its version and by a query.
const { resource: contact } = await contacts.item("c1", "c1").read();
assert.deepEqual(contact.data, { name: "John" });
assert.equal(contact.lastSeq, 1);
const accessCondition = { type: "IfMatch", condition: '"x"' };
await assert.rejects(
  contacts.item("c1", "c1").replace(contact, { accessCondition }),
  (error) => error.code === 412,
);
const query = "SELECT VALUE COUNT(1) FROM c WHERE c.type = 'domainEvent'";
assert.deepEqual((await contacts.items.query(query).fetchAll()).resources, [1]);

// A batch, and one that fails whole.
assert.deepEqual(await save("FromSdk"), [200, 201]);
assert.deepEqual(await save("Stale", contact._etag), [412, 424]);

// The change feed, before and after a split, from one continuation to the next.
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
let [seen, token] = await changes(ChangeFeedStartFrom.Beginning());
console.log("seen", ...seen);
console.log("split");
await lines.next();
await save("AfterSplit");
[seen] = await changes(ChangeFeedStartFrom.Continuation(token));
console.log("seen", ...seen);

// What the service does and the emulator does not.
const patch = [{ op: "set", path: "/data/name", value: "x" }];
const operations = [
  { operationType: BulkOperationType.Patch, id: "c1", resourceBody: { operations: patch } },
];
try {
  const { result } = await contacts.items.batch(operations, "c1");
  console.log("patches in batches:", result[0].statusCode);
} catch (error) {
  assert.match(error.message, /unknown variant `Patch`/);
  console.log("no patches in batches: 400");
}
console.log("done");
process.exit(0);
