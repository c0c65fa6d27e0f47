//! What the procedures do, on the server that `POSTRIDER_TEST_SQLSERVER` names.
