"""Receives all of a queue with sessions by Microsoft's SDK, unmodified.

Run: receive.py QUEUE, with the connection string in the environment. Several receivers, each with a
client of its own, take one session after the other, complete each message and print it as a line of
JSON. They end when no session has anything left, or after two minutes.
"""

import base64
import json
import os
import signal
import sys
import threading

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusClient
from azure.servicebus.exceptions import OperationTimeoutError

RECEIVERS = 8
# Seconds: for a session, for a first message of it, for a further one.
SESSION, FIRST, MORE = 1, 10, 0.2

lock = threading.Lock()
trouble = []


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def tell(message):
    properties = message.application_properties or {}
    line = {
        "id": message.message_id,
        "session": message.session_id,
        "sequence_number": message.sequence_number,
        "subject": message.subject,
        "content_type": message.content_type,
        "properties": {text(name): text(value) for name, value in properties.items()},
        "body": base64.b64encode(b"".join(message.body)).decode(),
    }
    with lock:
        print(json.dumps(line), flush=True)


def take(receiver):
    wait = FIRST
    while batch := receiver.receive_messages(max_message_count=200, max_wait_time=wait):
        for message in batch:
            receiver.complete_message(message)
            tell(message)
        wait = MORE


def work():
    try:
        connection = os.environ["CONNECTION_STRING"]
        with ServiceBusClient.from_connection_string(connection, retry_total=0) as bus:
            while True:
                receiver = bus.get_queue_receiver(
                    sys.argv[1], session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SESSION
                )
                try:
                    with receiver:
                        take(receiver)
                except OperationTimeoutError:
                    return
    except BaseException as error:
        trouble.append(error)


signal.alarm(120)
workers = [threading.Thread(target=work) for _ in range(RECEIVERS)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
for error in trouble:
    print(repr(error), file=sys.stderr)
sys.exit(1 if trouble else 0)
