commit transaction;
