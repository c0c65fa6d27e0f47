"""Receives the contacts' events by Microsoft's SDK, unmodified, one contact's session after another.

Run: receive.py, with the connection string in CONNECTION_STRING; it needs azure-servicebus. Each
event is printed, then completed. Ctrl-C ends it.
"""

import os

from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusClient
from azure.servicebus.exceptions import OperationTimeoutError

QUEUE = "contacts"


def receive(bus):
    # A session that is quiet for a second is given back, for the next contact's turn.
    with bus.get_queue_receiver(
        QUEUE, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=1
    ) as receiver:
        for message in receiver:
            print(f"{message.session_id}  {message.subject}  {message}", flush=True)
            receiver.complete_message(message)


with ServiceBusClient.from_connection_string(os.environ["CONNECTION_STRING"]) as client:
    try:
        while True:
            try:
                receive(client)
            except OperationTimeoutError:
                pass  # No session has an event.
    except KeyboardInterrupt:
        pass
