"""The console: pages to see and steer everything, served by the server under `/ui`.

Pages are made here from operations of the engine and HTML templates; they work without JavaScript. `docs/console.md`
describes them for users, and decisions 0130 to 0132 say why they are made this way.
"""
