// Search without a server: browsers start no Worker from a file, so that this runs
// the worker of the theme in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const copy = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      const page = this.frame.contentWindow.document;
      page.open();
      page.write(`<script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(
          () => new Promise((loaded) => {
            const script = document.createElement("script");
            script.src = url;
            script.onload = loaded;
            document.body.appendChild(script);
          })), Promise.resolve());
      </scr` + `ipt><script src="${url}"></scr` + `ipt>`);
      page.close();
    }
    postMessage(data) {
      // Messages that come before the worker has loaded wait for it.
      const frame = this.frame.contentWindow;
      const send = () => frame.dispatchEvent(new MessageEvent("message", {data}));
      if (frame.document.readyState === "complete") send();
      else frame.addEventListener("load", send);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
