begin transaction;
