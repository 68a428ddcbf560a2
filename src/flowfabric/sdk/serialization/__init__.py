"""The conversion of arguments, results and messages between Python types and JSON."""
